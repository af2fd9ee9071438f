"""One lane of extraction: fill the shards of its share that are missing, with one engine."""

import concurrent.futures
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aerie.engine import Answer, Request, read_captured
from aerie.files import InputError
from aerie.hidden_states import (
    BadStates,
    Sample,
    Shard,
    Store,
    Teacher,
    check_states,
    file_checksum,
)
from aerie.samples import Row


def share(shards: list[dict[str, Any]], lane: int, lanes: int) -> list[dict[str, Any]]:
    """The shards of lane `lane` of `lanes`: every `lanes`-th."""
    return shards[lane::lanes]


@dataclass
class LaneWork:
    """What a lane still has to do: the missing shards, and what each can copy from others."""

    store: Store
    rows: dict[str, Row]
    shards: list[dict[str, Any]]
    found: dict[str, tuple[Path, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing = [s for s in self.shards if not self._usable(s)]
        keys = {
            self.store.key(self.rows[i].input_ids, self.rows[i].loss_mask)
            for s in self.missing
            for i in s["samples"]
        }
        self.found = self.store.find_samples(keys)

    def _usable(self, shard: dict[str, Any]) -> bool:
        """Whether the shard is there and opens; one that does not is moved aside."""
        path = self.store.path(shard["id"])
        if not path.is_file():
            return False
        try:
            with Shard(path):
                return True
        except BadStates:
            self.store.set_aside(path)
            return False

    def to_extract(self) -> list[Row]:
        return [
            self.rows[i]
            for shard in self.missing
            for i in shard["samples"]
            if self.store.key(self.rows[i].input_ids, self.rows[i].loss_mask) not in self.found
        ]


def fill(
    work: LaneWork,
    start_engine: Callable[[], Any],
    teacher: Callable[[], Teacher],
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Extract what is missing and write the shards; return counts and the quarantined samples.

    The engine is started only when a sample has to be extracted. Compression and writing go on
    in a thread while the engine computes. `progress(samples, tokens)`.
    """
    rows = work.to_extract()
    counts: dict[str, Any] = {
        "extracted_samples": 0,
        "extracted_tokens": 0,
        "copied_samples": len(work.found),
        "quarantined": {},
    }
    arrived: dict[str, tuple[Path, int]] = {}
    waiting = {s["id"]: sum(1 for r in rows if r.id in set(s["samples"])) for s in work.missing}
    of_sample = {i: s for s in work.missing for i in s["samples"]}
    heads: list[Teacher] = []

    def write(shard: dict[str, Any]) -> None:
        samples, last, chosen = [], [], []
        for identity in shard["samples"]:
            row = work.rows[identity]
            key = work.store.key(row.input_ids, row.loss_mask)
            try:
                if key in work.found:
                    path, number = work.found[key]
                    with Shard(path) as other:
                        sample = other.read(number)
                    samples.append(replace(sample, id=identity))
                    continue
                if identity in counts["quarantined"]:
                    continue
                path, token = arrived.pop(identity)
                states, tokens = read_captured(path)
                if tokens.tolist() != row.input_ids:
                    raise BadStates("the engine saved the states of other tokens")
                check_states(states, tokens, work.store.convention)
            except BadStates as error:
                counts["quarantined"][identity] = str(error)
                continue
            samples.append(Sample(identity, tokens, states, row.loss_mask))
            last.append(states[-1:])
            chosen.append(token)
        if last:
            import torch

            if not heads:
                heads.append(teacher())
            heads[0].check(torch.cat(last), chosen, greedy=True)
        if samples:
            work.store.write(shard["id"], samples)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        writing: list[concurrent.futures.Future[None]] = []

        def done_with(identity: str) -> None:
            shard = of_sample[identity]
            waiting[shard["id"]] -= 1
            if waiting[shard["id"]] == 0:
                writing.append(pool.submit(write, shard))
            for future in [f for f in writing if f.done()]:
                writing.remove(future)
                future.result()

        for shard in work.missing:
            if waiting[shard["id"]] == 0:
                writing.append(pool.submit(write, shard))
        if rows:
            with start_engine() as engine:
                for answer in _answers(engine, rows, counts["quarantined"]):
                    identity = answer.key
                    if answer.states is not None:
                        arrived[identity] = (answer.states, answer.tokens[0])
                        counts["extracted_samples"] += 1
                        counts["extracted_tokens"] += len(answer.prompt)
                    done_with(identity)
                    progress(counts["extracted_samples"], counts["extracted_tokens"])
                for future in writing:
                    future.result()
        for future in writing:
            future.result()
    return counts


def _answers(engine: Any, rows: list[Row], quarantined: dict[str, str]) -> Iterator[Answer]:
    """One generated token for each row; a row the engine refuses is quarantined, with no states."""
    for row in rows:
        if len(row.input_ids) >= engine.max_model_len:
            quarantined[row.id] = (
                f"{len(row.input_ids)} tokens; the engine takes {engine.max_model_len - 1}"
            )
            yield Answer(row.id, row.input_ids, [], "refused", None)
    fitting = (Request(r.id, r.input_ids, 1) for r in rows if r.id not in quarantined)
    yield from engine.run(fitting)


def describe_lane(
    store: Store, shards: list[dict[str, Any]], counts: dict[str, Any], min_kept_share: float
) -> dict[str, Any]:
    """The lane's manifest: its shards with sizes and checksums, and what was left out.

    Raises `InputError` when a smaller share of the samples than `min_kept_share` is there.
    """
    entries, kept, wanted, omitted = [], 0, 0, 0
    for shard in shards:
        wanted += len(shard["samples"])
        path = store.path(shard["id"])
        if not path.is_file():
            continue
        with Shard(path) as opened:
            samples = [s["id"] for s in opened.samples]
            tokens = sum(s["tokens"] for s in opened.samples)
            omitted += opened.omitted_bytes()
        kept += len(samples)
        entries.append(
            {
                "id": shard["id"],
                "file": path.name,
                "split": shard["split"],
                "samples": samples,
                "tokens": tokens,
                "bytes": path.stat().st_size,
                "checksum": file_checksum(path),
            }
        )
    if kept < min_kept_share * wanted:
        raise InputError(
            f"only {kept} of {wanted} samples could be extracted, under "
            f"hidden_states.min_kept_share = {min_kept_share}: {counts['quarantined']}"
        )
    c = store.convention
    raw = sum(e["tokens"] for e in entries) * c.bytes_per_token()
    return {
        "convention": {
            "key": c.key,
            "verifier": c.fingerprint,
            "layer_ids": list(c.layer_ids),
            "hidden_size": c.hidden_size,
            "format": c.format,
            "last_layer": "before the final norm",
            "last_state": c.last_state,
        },
        "shards": entries,
        "samples": kept,
        "tokens": sum(e["tokens"] for e in entries),
        "raw_bytes": raw,
        "omitted_bytes": omitted,
        "bytes": sum(e["bytes"] for e in entries),
        **counts,
    }
