"""Whether the store's shards are whole and are what the manifests say."""

import concurrent.futures
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aerie.common.errors import InputError, UnusableStates
from aerie.common.progress import JobProgress
from aerie.maintenance.listing import find_shard, shard_files
from aerie.maintenance.references import (
    IMPORTS,
    Reference,
    References,
    read_references,
    without_path,
)
from aerie.states.checks import check_states
from aerie.states.facts import file_checksum, read_known
from aerie.states.ids import shard_id
from aerie.states.manifest import ImportManifest
from aerie.states.shard import Shard
from aerie.states.store import Store


@dataclass
class ShardFault:
    """What is wrong with a file, and how to repair it.

    `damaged`: the file itself must go. `stale`: manifests that are wrong. Without either, there
    is nothing to repair.
    """

    path: Path
    problems: list[str]
    damaged: bool
    stale: list[Path]

    @property
    def repair(self) -> str:
        steps = []
        if self.damaged and os.path.lexists(self.path):
            steps.append("move the file aside")
        if self.stale:
            steps.append("delete " + ", ".join(map(str, self.stale)))
        if self.damaged or self.stale:
            steps.append("start the run again: it makes what is missing")
        if _of_imports(self.stale):
            steps.append("import again what was imported")
        return ", ".join(steps)

    def show(self) -> None:
        print(self.path)
        for problem in self.problems[:5]:
            print(f"  {problem}")
        if len(self.problems) > 5:
            print(f"  and {len(self.problems) - 5} more")
        if self.repair:
            print(f"  repair: {self.repair}")


def verify_shard(path: Path, references: References) -> tuple[int, ShardFault | None]:
    """Read every sample of a shard and compare it with its checksum, its name and the manifests.

    Returns the tokens read, and what is wrong (None: nothing).
    """
    found = references.shards.get((path.parent.name, path.stem), [])
    manifests = sorted({r.manifest for r in found})
    tokens = 0
    problems: list[str] = []
    try:
        with Shard(path) as shard:
            problems += _wrong_place(shard, path, found)
            convention = shard.convention
            for number in range(len(shard.samples)):
                try:
                    sample = shard.read(number)
                    check_states(
                        sample.states,
                        sample.tokens,
                        convention,
                        sample.loss_mask,
                        sample.fp8 is not None,
                    )
                    tokens += len(sample.tokens)
                except UnusableStates as error:
                    problems.append(without_path(error, path))
    except UnusableStates as error:
        problems.append(without_path(error, path))
    except InputError as error:  # another version, or unreadable for now: its states may be fine
        return 0, ShardFault(path, [without_path(error, path)], False, [])
    if problems:
        return tokens, ShardFault(path, problems, True, _of_imports(manifests))
    stale = sorted({r.manifest for r in found if _differs(path, r)})
    if stale:
        text = "its samples are whole, but size or checksum of the file are not those of " + (
            ", ".join(map(str, stale))
        )
        return tokens, ShardFault(path, [text], False, stale)
    return tokens, None


def _differs(path: Path, reference: Reference) -> bool:
    entry = reference.entry
    return path.stat().st_size != entry.bytes or file_checksum(path) != entry.checksum


def _wrong_place(shard: Shard, path: Path, references: list[Reference]) -> list[str]:
    """How the shard contradicts its name or its folder's."""
    problems = []
    key = path.parent.name
    found = shard.convention
    if found.key != key:
        problems.append(f"foreign: it belongs to convention {found.key}, its folder is {key}")
    for reference in references:
        said = reference.convention
        if said.verifier != found.fingerprint or said.layer_ids != list(found.layer_ids):
            problems.append(f"{reference.manifest} gives the folder another verifier or layer ids")
    # The name of a shard that lacks samples still covers all that it should hold.
    left_out = read_known(path).left_out
    renamed = shard.name != path.stem
    if renamed or (not left_out and shard_id(e["key"] for e in shard.samples) != path.stem):
        problems.append("foreign: its samples are not those of its name")
    return problems


def missing_shards(store: Path, references: References) -> list[ShardFault]:
    """Shards that a manifest names and that are not there."""
    missing = []
    for (key, _), found in sorted(references.shards.items()):
        path = store / "hidden_states" / key / found[0].entry.file
        if not os.path.lexists(path):
            stale = _of_imports({r.manifest for r in found})
            missing.append(ShardFault(path, ["missing, though a manifest names it"], True, stale))
    return missing


def _of_imports(manifests: Iterable[Path]) -> list[Path]:
    return sorted(m for m in manifests if m.parent.name == IMPORTS)


def repair(finding: ShardFault) -> None:
    """Do what `ShardFault.repair` says, so that the next run makes the shard again.

    A lane runs again when its manifest is gone or names a shard that is. An import's manifest
    loses only its entry for this shard, because nothing else refers to its other shards.
    """
    if finding.damaged and os.path.lexists(finding.path):
        Store.set_aside(finding.path)
    for path in finding.stale:
        if path.parent.name != IMPORTS:
            path.unlink(missing_ok=True)
            continue
        manifest = ImportManifest.read(path)
        manifest.shards = [e for e in manifest.shards if e.file != finding.path.name]
        manifest.write(path)


def verify_store(
    store: Path, results: list[Path], shards: list[str], sample: float | None, set_aside: bool
) -> bool:
    """Verify `shards` (ids or files; none: all) and print what is wrong; whether all is well.

    `sample`: so many of them, or below 1 so large a share, chosen at random. `set_aside`: repair.
    """
    references = read_references(store, results)
    if shards:
        paths = [find_shard(store, name) for name in shards]
        findings = []
    else:
        paths = shard_files(store)
        findings = missing_shards(store, references)
    if sample:
        number = int(sample) if sample >= 1 else max(1, round(sample * len(paths)))
        paths = sorted(random.sample(paths, min(number, len(paths))))
    tokens = 0
    with (
        JobProgress("verify", len(paths), "shards") as bar,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        verified = pool.map(lambda path: verify_shard(path, references), paths)
        for done, (read, finding) in enumerate(verified):
            tokens += read
            if finding:
                findings.append(finding)
            bar.update(done + 1, f"{len(findings)} wrong")
    for finding in findings:
        finding.show()
        if set_aside:
            repair(finding)
    for path, error in references.unreadable.items():
        print(f"{path}\n  {error}\n  repair: delete it and start its run again")
    wrong = len(findings) + len(references.unreadable)
    print(f"{len(paths)} shards with {tokens} tokens read, {wrong} wrong")
    if any(finding.repair for finding in findings):
        print(
            "Repaired; now start the runs again (`make run` with their CONFIG)."
            if set_aside
            else "`store.py verify --set-aside` makes these repairs."
        )
    return not wrong
