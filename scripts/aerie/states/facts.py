"""What is known of a shard, in a JSON file beside it."""

import os
from pathlib import Path
from typing import Any

import xxhash
from pydantic import Field

from aerie.common.errors import InputError
from aerie.common.records import Record


class ShardFacts(Record):
    """What is known of a shard.

    A file with `left_out` alone was written before its shard, so that a kill between the two
    loses nothing.
    """

    bytes: int | None = None
    """Size of the shard's file. 0: every sample was left out, so there is no shard."""
    checksum: str | None = None
    """xxh3-64 of the shard's file, hexadecimal."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Samples that the shard lacks: key → reason."""

    def as_json(self) -> dict[str, Any]:
        """The facts that are known."""
        return self.model_dump(mode="json", exclude_none=True)


def facts_path(shard: Path) -> Path:
    """The file beside a shard."""
    return shard.with_suffix(".json")


def read_known(shard: Path) -> ShardFacts:
    """The facts beside a shard as far as they are known; none when the file cannot be read."""
    try:
        return ShardFacts.read(facts_path(shard))
    except InputError:
        return ShardFacts()


def read_facts(shard: Path) -> ShardFacts:
    """All facts of an existing shard; written again if a kill came between the two files."""
    facts = read_known(shard)
    if facts.bytes is None or facts.checksum is None:
        return write_facts(shard, facts.left_out)
    return facts


def write_facts(shard: Path, left_out: dict[str, str]) -> ShardFacts:
    """Write and return the facts of an existing shard."""
    facts = ShardFacts(bytes=shard.stat().st_size, checksum=file_checksum(shard), left_out=left_out)
    facts.write(facts_path(shard))
    return facts


def write_nothing_kept(shard: Path, left_out: dict[str, str]) -> None:
    """Record that there is no shard because each of its samples was left out."""
    ShardFacts(bytes=0, left_out=left_out).write(facts_path(shard))


def nothing_kept(shard: Path) -> dict[str, str]:
    """Why each sample of a shard was left out, by key; empty when some were kept, or nothing is
    known."""
    facts = read_known(shard)
    if facts.bytes != 0 or os.path.lexists(shard):
        return {}
    return facts.left_out


def file_checksum(path: Path) -> str:
    """xxh3-64 of a whole file."""
    state = xxhash.xxh3_64()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()
