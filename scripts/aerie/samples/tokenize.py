"""Samples: conversations as token rows with their loss masks, and their cut into shards."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from aerie.chat.encoding import Unverified
from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.common.files import atomic_write
from aerie.states.ids import group_records, sample_key, shard_id

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "record": pa.string(),
        "source": pa.string(),
        "split": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "last_turn": pa.int32(),
        "next_token": pa.int32(),
    }
)


@dataclass
class TokenizedSample:
    """One sample.

    `input_ids` [T]; `loss_mask` [T], True for the verifier's own words; `last_turn`: position of
    the last answer's first token; `next_token`: the token that followed the row, -1 when
    unknown. A generated answer's last token is not in the row: it was never an input of the
    verifier, so it has no hidden state; it is the row's `next_token`.
    """

    id: str
    record: str
    source: str
    split: str
    input_ids: list[int]
    loss_mask: list[bool]
    last_turn: int
    next_token: int


class Dropped(Exception):
    """A record that yields no sample; the message is the reason under which it is counted."""


def rows_of_answer(
    record: dict[str, Any], split: str, answer: dict[str, Any], limits: dict[str, int]
) -> list[TokenizedSample]:
    """Samples of a generated conversation (see `responses.converse`).

    `limits`: `max_length` and `min_supervised_tokens`. Raises `Dropped` with the reason when
    none is left.
    """
    if answer.get("dropped"):
        raise Dropped(answer["dropped"])
    rows = []
    for number, sample in enumerate(answer["samples"]):
        ids = sample["ids"]
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in sample["spans"]:
            mask[start:end] = True
        rows.append(
            TokenizedSample(
                id=record["id"] if number == 0 else f"{record['id']}-{number}",
                record=record["id"],
                source=record["source"],
                split=split,
                input_ids=ids[:-1],
                loss_mask=mask[:-1].tolist(),
                last_turn=sample["spans"][-1][0],
                next_token=ids[-1],
            )
        )
    kept = [r for r in rows if sum(r.loss_mask) >= limits["min_supervised_tokens"]]
    if not kept:
        raise Dropped("too few supervised tokens")
    return kept


def rows_of_conversation(
    record: dict[str, Any],
    split: str,
    template: ChatTemplate,
    limits: dict[str, int],
    supervise_reasoning: bool = True,
) -> list[TokenizedSample]:
    """The sample of a conversation with its own answers (`generation.mode: keep`)."""
    try:
        masked = template.mask(record["messages"], record.get("tools"), supervise_reasoning)
    except Unverified as error:
        raise Dropped(f"loss mask not verified: {error}") from None
    end = limits["max_length"]
    ids, mask = list(masked.input_ids[:end]), [bool(m) for m in masked.loss_mask[:end]]
    if not any(mask):
        raise Dropped("prompt fills the window")
    if sum(mask) < limits["min_supervised_tokens"]:
        raise Dropped("too few supervised tokens")
    following = masked.input_ids[end] if len(masked.input_ids) > end else -1
    last_turn = masked.last_turn
    if last_turn >= len(ids):
        last_turn = max(i for i in range(len(ids)) if mask[i] and (i == 0 or not mask[i - 1]))
    return [
        TokenizedSample(
            record["id"], record["id"], record["source"], split, ids, mask, last_turn, following
        )
    ]


def group_by_shard(records: list[dict[str, Any]], mean: int) -> list[list[int]]:
    """Positions of the records of each shard: known before an answer is generated."""
    return group_records([r["id"] for r in records], mean)


def describe_shard(
    split: str, rows: list[TokenizedSample], last_state: str = "all"
) -> dict[str, Any]:
    """The entry of `samples/shards.json` for the samples of one group, in order.

    With `last_state: supervised` the loss masks say what is stored, so they are part of the id.
    """
    supervised = last_state == "supervised"
    keys = (sample_key(r.input_ids, r.loss_mask if supervised else None) for r in rows)
    return {
        "id": shard_id(keys),
        "split": split,
        "tokens": sum(len(r.input_ids) for r in rows),
        "samples": [r.id for r in rows],
    }


def write_samples(path: Path, rows: list[TokenizedSample]) -> None:
    table = pa.Table.from_pylist([vars(r) for r in rows], schema=SCHEMA)
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_samples(path: Path) -> dict[str, TokenizedSample]:
    """Rows by id, in the order of the file."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not readable as Parquet ({error})") from error
    if missing := set(SCHEMA.names) - set(table.column_names):
        raise InputError(
            f"{path}: found the columns {table.column_names}, expected also {sorted(missing)}; "
            "delete it and start the run again, it is made anew"
        )
    rows: dict[str, TokenizedSample] = {}
    number: dict[int, int] = {}  # one object for each: an id takes 8 bytes and not 36
    for batch in table.select(SCHEMA.names).to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            row["input_ids"] = [number.setdefault(i, i) for i in row["input_ids"]]
            rows[row["id"]] = TokenizedSample(**row)
    return rows


class Counts:
    """Records in, samples kept, why the rest was dropped, and what the chat template lost of the
    records, with three examples a reason."""

    def __init__(self) -> None:
        self.records = 0
        self.kept = 0
        self.with_losses = 0
        self.dropped: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def drop(self, record: str, reason: str) -> None:
        self.dropped[reason] += 1
        self._show(record, reason)

    def lose(self, record: str, parts: list[str]) -> None:
        self.with_losses += bool(parts)
        for part in parts:
            self.lost[part] += 1
            self._show(record, f"the template loses: {part}")

    def _show(self, record: str, reason: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < 3:
            examples.append(record)

    def report(self) -> dict[str, Any]:
        return {
            "records_in": self.records,
            "records_kept": self.kept,
            "dropped": dict(self.dropped.most_common()),
            "lost_by_template": dict(self.lost.most_common()),
            "examples": self.examples,
        }


def summarize(rows: list[TokenizedSample]) -> dict[str, Any]:
    """Lengths and supervised share of samples, for the report."""
    lengths = np.array([len(r.input_ids) for r in rows])
    supervised = np.array([sum(r.loss_mask) for r in rows])
    return {
        "samples": len(rows),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(supervised.sum()),
        "supervised_share": float(supervised.sum() / max(1, lengths.sum())),
        "length": {
            name: float(np.percentile(lengths, q))
            for name, q in (("p10", 10), ("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))
        }
        if len(rows)
        else {},
        "lengths": np.histogram(lengths, bins=40)[0].tolist() if len(rows) else [],
        "length_edges": np.histogram(lengths, bins=40)[1].tolist() if len(rows) else [],
    }
