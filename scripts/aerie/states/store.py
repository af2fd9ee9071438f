"""The store: one folder of shards for each convention."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from aerie.common.errors import AerieError, InputError
from aerie.states.convention import FORMATS, LAST_STATES, Convention
from aerie.states.facts import ShardFacts, facts_path, nothing_kept, write_facts
from aerie.states.ids import sample_key
from aerie.states.shard import Sample, Shard
from aerie.states.shard_writer import write_shard_file

QUARANTINE = "damaged"
"""Folder beside the shards to which damaged ones are moved."""


class Store:
    """The folder of one convention's shards."""

    def __init__(self, root: Path, convention: Convention):
        if convention.format not in FORMATS or convention.last_state not in LAST_STATES:
            raise InputError(
                f"found format {convention.format!r}, last_state {convention.last_state!r}; "
                f"expected one of {', '.join(FORMATS)} and one of {', '.join(LAST_STATES)}"
            )
        if convention.hidden_size % 8:
            raise InputError(
                f"the verifier's hidden size is {convention.hidden_size}; expected a multiple of "
                "8, as shards need it"
            )
        self.convention = convention
        self.folder = Path(root) / "hidden_states" / convention.key

    def path(self, shard: str) -> Path:
        return self.folder / f"{shard}.safetensors"

    def has(self, shard: str) -> bool:
        return self.path(shard).is_file()

    def key(self, tokens: Sequence[int], loss_mask: Sequence[bool]) -> str:
        """`sample_key` of a sample in this convention."""
        supervised = self.convention.last_state == "supervised"
        return sample_key(tokens, loss_mask if supervised else None)

    def write(
        self, shard: str, samples: list[Sample], beat: Callable[[], None] = lambda: None
    ) -> Path:
        """Write a shard without its facts (`write_shard_file`); return its path."""
        path = self.path(shard)
        write_shard_file(path, self.convention, samples, beat)
        return path

    def find_samples(self, keys: set[str]) -> dict[str, tuple[Path, int]]:
        """Where samples with these keys lie in any shard of the folder: file and position."""
        found: dict[str, tuple[Path, int]] = {}
        if not keys or not self.folder.is_dir():
            return found
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with Shard(path) as shard:
                    for number, entry in enumerate(shard.samples):
                        if entry["key"] in keys:
                            found[entry["key"]] = (path, number)
            except AerieError:
                continue
        return found

    @staticmethod
    def set_aside(shard: Path) -> Path | None:
        """Move a damaged shard to `damaged/`, so that it is made again.

        Returns its new path; None when another process was first.
        """
        target = shard.parent / QUARANTINE / shard.name
        with contextlib.suppress(FileNotFoundError):
            target.parent.mkdir(exist_ok=True)
            if target.is_dir() and not target.is_symlink():  # a file cannot replace a folder
                shutil.rmtree(target)
            elif shard.is_dir():  # nor a folder a file
                target.unlink(missing_ok=True)
            shard.replace(target)
            return target
        return None


def write_shard(
    store: Store,
    shard: str,
    samples: list[Sample],
    left_out: dict[str, str],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Write a shard, and beside it its facts: `left_out` are the samples it lacks, key → reason."""
    facts = facts_path(store.path(shard))
    if left_out or facts.exists():  # before the shard: a kill in between must not lose them
        ShardFacts(left_out=left_out).write(facts)
    write_facts(store.write(shard, samples, beat), left_out)


def is_done(store: Store, shard: str) -> bool:
    """Whether the shard is there, or it is known that none of its samples could be kept."""
    return store.has(shard) or bool(nothing_kept(store.path(shard)))
