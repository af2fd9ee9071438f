"""The store's side of a lane: what lies beside a shard, disk space, the teacher's verdict."""

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import set_num_threads  # vLLM puts a function that does nothing in its place

from aerie.common.errors import AerieError, InputError, UnusableStates
from aerie.common.files import free_bytes, read_optional, write_json
from aerie.states.shard import (
    Sample,
    Shard,
    Store,
    Teacher,
    file_checksum,
    judge_ranks,
)

FEWEST_FOR_A_VERDICT = 8
"""Samples with the same fault in a shard from which on the fault is not theirs."""

ENOUGH_FOR_A_VERDICT = 32
"""Tokens that are judged together where there are fewer samples: of several small shards, or of
the ends of answers."""


def facts_path(shard: Path) -> Path:
    """The JSON file beside a shard: `bytes`, `checksum` (of the file), `left_out` (by key).

    Of a shard whose samples were all left out there is this file alone, with 0 `bytes`.
    """
    return shard.with_suffix(".json")


def write_shard(
    store: Store,
    shard: str,
    samples: list[Sample],
    left_out: dict[str, str],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Write a shard, and beside it its size and checksum and which samples it lacks, and why."""
    facts = facts_path(store.path(shard))
    if left_out or facts.exists():  # before the shard: a kill in between must not lose them
        write_json(facts, {"left_out": left_out})
    write_facts(store.write(shard, samples, beat), left_out)


def write_facts(path: Path, left_out: dict[str, str]) -> dict[str, Any]:
    facts = {
        "bytes": path.stat().st_size,
        "checksum": file_checksum(path),
        "left_out": left_out,
    }
    write_json(facts_path(path), facts)
    return facts


def read_facts(path: Path) -> dict[str, Any]:
    """The facts beside a shard; made anew when a kill came between the two files."""
    facts = read_optional(facts_path(path))
    if facts.keys() >= {"bytes", "checksum", "left_out"}:
        return facts
    return write_facts(path, facts.get("left_out", {}))


def write_nothing_kept(path: Path, left_out: dict[str, str]) -> None:
    """Say beside a shard that there is none, because each of its samples was left out."""
    write_json(facts_path(path), {"bytes": 0, "left_out": left_out})


def nothing_kept(path: Path) -> dict[str, str]:
    """Why each sample of a shard was left out, by key; empty when something of it was kept, or
    nothing is known of it."""
    facts = read_optional(facts_path(path))
    if facts.get("bytes") != 0 or os.path.lexists(path):
        return {}
    return facts.get("left_out", {})


def is_done(store: Store, shard: str) -> bool:
    """Whether the store holds the shard, or says that nothing of it could be kept."""
    return store.has(shard) or bool(nothing_kept(store.path(shard)))


# Disk space


def measured_ratio(store: Store, shards: int = 32) -> float:
    """Stored bytes by bf16 bytes in the first shards of the store, with 5 % more; 1 for none."""
    stored = raw = 0
    for path in sorted(store.folder.glob("*.safetensors"))[:shards]:
        try:
            with Shard(path) as shard:
                raw += sum(s["tokens"] for s in shard.samples) * store.convention.bytes_per_token()
                stored += shard.size
        except AerieError:
            continue
    return min(1.0, 1.05 * stored / raw) if raw else 1.0


def check_room(store: Store, tokens: int, max_gib: float | None) -> None:
    """Raise `InputError` with the figures when the states of `tokens` tokens do not fit.

    Into what is free on the store's disk, and, with all that is stored there, into `max_gib`.
    """
    if not tokens:
        return
    ratio, c = measured_ratio(store), store.convention
    needed = tokens * c.bytes_per_token() * ratio
    free, root = free_bytes(store.folder), store.folder.parent
    figures = (
        f"the states of {tokens:,} tokens take {needed / 2**30:.2f} GiB ({len(c.layer_ids)} states "
        f"of {c.hidden_size} x 2 bytes a token, stored at {ratio:.2f} of that)"
    )
    way = (
        "extract fewer samples (corpus.limit), or remove shards that nothing uses "
        "(scripts/store.py gc)"
    )
    if needed > free:
        raise InputError(
            f"{figures}, and {free / 2**30:.2f} GiB are free at {root}: make room, {way}"
        )
    if max_gib is not None:
        stored = 0
        for path in root.rglob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another run moves or collects it
                stored += path.stat().st_size
        if stored + needed > max_gib * 2**30:
            raise InputError(
                f"{figures}; with the {stored / 2**30:.2f} GiB in {root} that is more than "
                f"hidden_states.max_gib = {max_gib}: raise it, {way}"
            )


def find_mismatched_samples(
    teacher: Teacher, samples: list[tuple[str, torch.Tensor, list[int]]], greedy: bool
) -> dict[str, str]:
    """Samples whose last states do not lead to the tokens that the verifier chose, and why.

    `samples`: id, states [T, ids, hidden], the tokens that followed its last positions. Raises
    `UnusableStates` when so many disagree that the fault is not the samples'.
    """
    if not samples:
        return {}
    last = torch.cat([states[-len(chosen) :, -1] for _, states, chosen in samples])
    tokens = [token for *_, chosen in samples for token in chosen]
    ranks = teacher.ranks(last, torch.tensor(tokens))
    # States that have nothing to do with the token give it any rank; one in a thousand is luck.
    limit = (
        min(100, max(5, len(teacher.head) // 1000))
        if greedy
        else max(1000, len(teacher.head) // 20)
    )
    found = {}
    own_ranks = ranks.split([len(chosen) for *_, chosen in samples])
    for (identity, *_), own in zip(samples, own_ranks, strict=True):
        if (own >= limit).float().mean() > 0.5:
            found[identity] = (
                "lm_head(final_norm(last state)) does not lead to the token that the verifier "
                f"chose: {int(own.max())} tokens come before it"
            )
    fine = [
        own for (identity, *_), own in zip(samples, own_ranks, strict=True) if identity not in found
    ]
    if len(found) >= FEWEST_FOR_A_VERDICT and len(found) > len(samples) / 2:
        judge_ranks(ranks, greedy)  # its words, where it sees it too
        raise UnusableStates(next(iter(found.values())) + f", and so in {len(found)} samples")
    if len(fine) >= FEWEST_FOR_A_VERDICT or sum(map(len, fine)) >= ENOUGH_FOR_A_VERDICT:
        judge_ranks(torch.cat(fine), greedy)
    return found


def writers(most: int) -> concurrent.futures.ThreadPoolExecutor:
    """At most `most` threads that check, pack and write beside an engine; make it before that."""
    cores = os.sched_getaffinity(0)

    def prepare() -> None:
        # vLLM's CPU worker binds the main thread to a core, and threads inherit that.
        os.sched_setaffinity(0, cores)
        # More OpenMP threads than cores, and libgomp lets all of them sleep at every barrier: the
        # engine would be a tenth slower from the first use of torch here on.
        set_num_threads(1)
        thread = threading.get_native_id()
        # What the engine waits for comes before what writes.
        os.setpriority(
            os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 10)
        )

    return concurrent.futures.ThreadPoolExecutor(min(most, len(cores)), initializer=prepare)
