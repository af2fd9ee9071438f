"""Which records and samples share a shard of hidden states, `samples/shards.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aerie.common.files import read_json_lines
from aerie.common.records import Record
from aerie.samples.file import TokenizedSample
from aerie.states.ids import group_records, sample_key, shard_id

Splits = dict[str, list[dict[str, Any]]]
"""Records by split, `train` and `heldout`."""


class ShardPlan(Record):
    """A shard that the extraction makes."""

    id: str
    """Hash of the tokens of its samples (and of their loss masks, see `last_state`)."""
    split: str
    """`train` or `heldout`."""
    tokens: int
    """Tokens of all its samples."""
    samples: list[str]
    """Ids of its samples, in order."""


class ShardList(Record):
    """All shards of a run. Records are cut into shards by their own ids, so an edit of the corpus
    touches the shards around it only."""

    shards: list[ShardPlan]
    """The shards, in order."""


def read_splits(train: Path, heldout: Path) -> Splits:
    """The records of `prompts/train.jsonl.zst` and `prompts/heldout.jsonl.zst`."""
    return {"train": list(read_json_lines(train)), "heldout": list(read_json_lines(heldout))}


def group_splits(splits: Splits, mean: int) -> list[tuple[str, list[dict[str, Any]]]]:
    """Split and records of each shard, `mean` records on average: known before an answer is
    generated, since the records' ids alone decide."""
    return [
        (split, [records[position] for position in positions])
        for split, records in splits.items()
        for positions in group_records([r["id"] for r in records], mean)
    ]


def plan_shard(
    split: str,
    samples: Sequence[TokenizedSample],
    last_state: str = "all",
) -> ShardPlan:
    """The shard of these samples, in this order.

    `last_state`: `all` or `supervised`. With `supervised` the loss masks decide what is stored, so
    they are part of the id.
    """
    masked = last_state == "supervised"
    return ShardPlan(
        id=shard_id(sample_key(s.input_ids, s.loss_mask if masked else None) for s in samples),
        split=split,
        tokens=sum(len(s.input_ids) for s in samples),
        samples=[s.id for s in samples],
    )
