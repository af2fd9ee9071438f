"""What the store already holds of a run's answers and hidden states."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.config import Config
from aerie.planning.counts import Counts, Ids
from aerie.samples.shards import ShardList
from aerie.verifier.fingerprint import Fingerprint

LARGEST_ANSWERS = 200 * 2**20
"""Answers of more bytes than this are not read to see which prompts have one."""


@dataclass
class Kept:
    """Answers and shards in the store, `tokens` in these shards, and tokens whose states generation
    cannot capture (`later`)."""

    answers: int = 0
    shards: int = 0
    tokens: int = 0
    later: int = 0


def find_kept(config: Config, run: Path, fingerprint: Fingerprint | None, counts: Counts) -> Kept:
    """What the store holds for this run. Sets `counts.shards`."""
    from aerie.states.convention import Convention
    from aerie.states.store import Store, is_done

    counts.shards = max(1, round(counts.samples / config.hidden_states.samples_per_shard))
    if not fingerprint or fingerprint.source != config.verifier.source:
        return Kept()
    convention = Convention.of(fingerprint, config.hidden_states)
    store = Store(Path(config.store), convention)
    generating = config.generation.mode == "generate"
    if counts.tokenized:
        shards = ShardList.read(run / "samples/shards.json").shards
        here = [s for s in shards if is_done(store, s.id)]
        tokens = sum(s.tokens for s in here)
        counts.shards = len(shards)
        answers = counts.records if generating else 0
        return Kept(answers, len(here), tokens, counts.tokens - tokens)
    if counts.splits is None or not generating:
        return Kept()
    return find_kept_groups(config, fingerprint.fingerprint, counts, counts.splits, store)


def find_kept_groups(
    config: Config, fingerprint: str, counts: Counts, splits: Ids, store: Any
) -> Kept:
    """`find_kept` for counted prompts: the groups of records that become shards are known before
    any answer is."""
    from aerie.generation.answers import AnswerStore, Sampling
    from aerie.samples.conversion import Dropped, samples_of_answer
    from aerie.samples.shards import plan_shard
    from aerie.states.ids import group_records
    from aerie.states.store import is_done

    generation = config.generation
    sampling = Sampling.of(generation, config.samples)
    answers = AnswerStore(Path(config.store), sampling.key(fingerprint))
    known: dict[str, Any] = {}
    if sum(p.stat().st_size for p in answers.folder.glob("*.zst")) <= LARGEST_ANSWERS:
        known = answers.load({i for ids in splits.values() for i in ids})
    kept = Kept(answers=len(known))
    mean = counts.tokens / max(1, counts.records)
    counts.shards = 0
    for split, ids in splits.items():
        groups = group_records(ids, config.hidden_states.samples_per_shard)
        counts.shards += len(groups)
        for group in groups:
            have = [known[ids[p]] for p in group if ids[p] in known]
            samples = []
            for answer in have:
                try:
                    record = {"id": answer.id, "source": ""}
                    samples += samples_of_answer(record, split, answer, config.samples)
                except Dropped:
                    continue
            shard = plan_shard(split, samples, config.hidden_states.last_state)
            if len(have) == len(group) and samples and is_done(store, shard.id):
                kept.shards += 1
                kept.tokens += shard.tokens
            elif have or not generation.capture or generation.endpoints:
                # States of answers that were given before are copied or extracted.
                kept.later += round(mean * len(group))
    return kept
