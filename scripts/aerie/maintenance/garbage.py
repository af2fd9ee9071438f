"""Files of the store that nothing needs any more."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aerie.common.errors import InputError
from aerie.common.formatting import as_bytes
from aerie.common.leases import Leases
from aerie.maintenance.listing import file_bytes, shard_files
from aerie.maintenance.references import References, read_references
from aerie.states.facts import nothing_kept
from aerie.states.store import QUARANTINE

DAY = 86400.0
"""Seconds."""


@dataclass
class Garbage:
    path: Path
    bytes: int
    why: str


def find_garbage(store: Path, references: References) -> list[Garbage]:
    """Files of the store that can be deleted; docs/runbook.md says what counts as such.

    Shards are among them only if every run is finished and every manifest is readable: an
    extraction may copy samples from shards that no manifest names any more.
    """
    found = []
    all_known = not references.unfinished and not references.unreadable
    if all_known:
        for path in shard_files(store):
            if not references.runs(path.parent.name, path.stem):
                found.append(Garbage(path, file_bytes(path), "no manifest names it"))
    doomed = {g.path for g in found}
    for path in sorted(store.glob("hidden_states/*/*.json")):
        shard = path.with_suffix(".safetensors")
        wanted = not all_known or references.runs(path.parent.name, path.stem)
        if shard in doomed or not (shard.exists() or (wanted and nothing_kept(shard))):
            found.append(Garbage(path, file_bytes(path), "it lay beside a shard"))
    for pattern in (f"hidden_states/*/{QUARANTINE}/*", "answers/*/*.damaged"):
        for path in sorted(store.glob(pattern)):
            found.append(Garbage(path, file_bytes(path), "damaged, was set aside"))
    for path in sorted(_stale_temporaries(store)):
        found.append(Garbage(path, file_bytes(path), "temporary, left by a killed process"))
    return found


def _stale_temporaries(store: Path) -> Iterator[Path]:
    """Temporary files of `files.atomic_write`, leases, and folders of a verifier's import.

    Stale when untouched for a day, or when the process whose id is in the name has ended.
    Processes of other machines are not visible, so such a file must be untouched for an hour too.
    """
    now = time.time()
    leases = store.rglob(".*.lease*")
    for path in [*store.rglob(".*.tmp"), *leases, *store.glob("verifiers/.import-*")]:
        try:
            age = now - path.stat().st_mtime
        except FileNotFoundError:
            continue
        process = path.name.split(".")[-3] if path.name.count(".") >= 4 else ""
        ended = process.isdigit() and not Path("/proc", process).exists()
        if age > DAY or (age > DAY / 24 and ended):
            yield path


def collect_garbage(store: Path, results: list[Path], named: bool, delete: bool) -> bool:
    """Print the garbage, and `delete` it if asked to; whether nothing resisted.

    `named`: the user named the `results`. Raises `InputError` when it is not certain whose the
    store is, and when a run is at work that may need what would be deleted.
    """
    if store.parent.name != "results" and not named:
        raise InputError(
            f"{store} may be used by runs of several folders, whose shards must not be collected: "
            "name them all, such as --results results --results ../other/results"
        )
    if delete:
        _refuse_beside_runs(results)
    references = read_references(store, results)
    for run, reason in references.unfinished.items():
        print(f"{run} is unfinished: {reason}")
    for path, error in references.unreadable.items():
        print(f"{path}: {error}")
    if references.unfinished or references.unreadable:
        print("So no shard is collected; finish these runs or delete their folders.")
    found = find_garbage(store, references)
    kept = 0
    for item in list(found):
        print(f"{as_bytes(item.bytes):>11}  {item.path}  ({item.why})")
        try:
            if delete:
                _delete(item.path)
        except OSError as error:
            print(f"           not deleted: {error.strerror}")
            found.remove(item)
            kept += 1
    total = sum(item.bytes for item in found)
    print(
        f"{len(found)} files, {total} bytes ({as_bytes(total)}) "
        + ("deleted" if delete else "could be deleted: `store.py gc --delete`")
        + (f"; {kept} could not be" if kept else "")
    )
    return not kept


def _refuse_beside_runs(results: list[Path]) -> None:
    for place in results:
        locks = place.parent / ".snakemake/locks"
        if locks.is_dir() and any(locks.iterdir()):
            raise InputError(
                f"{locks} is not empty: Snakemake works here, or was killed. Let it finish, or run "
                "it again, or `snakemake --unlock`; nothing was deleted"
            )
        for lease in place.glob("*/.run.lease"):
            if who := Leases().alive(lease.parent / "run"):
                raise InputError(
                    f"{lease.parent}: a run is at work ({who}); let it finish, nothing was deleted"
                )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
