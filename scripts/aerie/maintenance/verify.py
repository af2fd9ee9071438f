"""Care of the store: what the runs name in it, whether its shards are whole, what nobody needs.

The runs are the folders in one or more folders of results. What one names is read from the lanes'
manifests (`hidden_states/lane-*.json`: shard and convention) and from `samples/shards.json`
(shards, before and while they are extracted).
"""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aerie.common.errors import AerieError, InputError, UnusableStates
from aerie.common.files import read_json, read_optional, write_json
from aerie.extraction.lane import nothing_kept
from aerie.states.shard import QUARANTINE, Shard, Store, check_states, file_checksum, shard_id

IMPORTS = "imports"
"""Folder of the store with the manifests of imported shards, see `exchange.import_files`."""

DAY = 86400.0


@dataclass
class Naming:
    """One manifest's entry for a shard: its `file`, `bytes` and `checksum`, among others."""

    run: str
    manifest: Path
    convention: dict[str, Any]
    entry: dict[str, Any]


@dataclass
class Named:
    """What the runs name.

    `shards`: by (convention's key, shard id). `wanted`: shards of `samples/shards.json` that no
    lane of that run has listed, by id: the run, and the samples' ids. `unfinished`: runs of
    which it cannot be told yet what they need, with the reason. `unreadable`: damaged manifests.
    """

    shards: dict[tuple[str, str], list[Naming]] = field(default_factory=dict)
    wanted: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)

    def runs(self, key: str, shard: str) -> list[str]:
        """Names of the runs (and imports) that name this shard."""
        found = {n.run for n in self.shards.get((key, shard), [])}
        return sorted(found | {run for run, _ in self.wanted.get(shard, [])})


def read_named(store: Path, results: list[Path]) -> Named:
    """Read the manifests of all runs in the folders `results`, and of the imports in `store`.

    Raises `InputError` for a folder that is none of results: whoever believed that it names
    nothing would delete what its runs need.
    """
    named = Named()
    for place in results:
        if _is_run(place):
            raise InputError(f"{place}: the folder of a run; expected the one that holds runs")
    for folder in sorted(p for place in results for p in place.glob("*") if p.is_dir()):
        if folder.resolve() != store.resolve():
            read_run(folder, named)
    for path in sorted((store / IMPORTS).glob("*.json")):
        _read_manifest(path, "(import)", named)
    return named


def _is_run(folder: Path) -> bool:
    parts = ("prompts", "responses", "samples", "hidden_states")
    return any((folder / part).is_dir() for part in parts)


def read_run(folder: Path, named: Named) -> None:
    """Add what the run in this folder names to `named`; nothing when it is none."""
    if not _is_run(folder):
        return
    listed: set[str] = set()
    quarantined: set[str] = set()
    for path in sorted(folder.glob("hidden_states/lane-*.json")):
        manifest = _read_manifest(path, folder.name, named)
        if manifest:
            listed |= {e["id"] for e in manifest["shards"]}
            quarantined |= set(manifest.get("quarantined", {}))
    path = folder / "samples/shards.json"
    if not path.is_file():
        named.unfinished[str(folder)] = "samples/shards.json is not there"
        return
    try:
        shards = {s["id"]: list(s["samples"]) for s in read_json(path)["shards"]}
    except InputError as error:
        named.unreadable[path] = _without_path(error, path)
        return
    except (KeyError, TypeError):
        named.unreadable[path] = "holds no list of shards"
        return
    unlisted = {i: s for i, s in shards.items() if i not in listed}
    for identity, samples in unlisted.items():
        named.wanted.setdefault(identity, []).append((folder.name, samples))
    # Of the others nothing could be kept.
    waiting = [i for i, s in unlisted.items() if not set(s) <= quarantined]
    if waiting:
        named.unfinished[str(folder)] = f"{len(waiting)} shards are not extracted yet"
    elif (folder / "responses").is_dir() and not (folder / "responses/manifest.json").is_file():
        named.unfinished[str(folder)] = "responses/manifest.json is not there"


def _read_manifest(path: Path, run: str, named: Named) -> dict[str, Any] | None:
    try:
        manifest = read_json(path)
        convention = manifest["convention"]
        for entry in manifest["shards"]:
            naming = Naming(run, path, convention, entry)
            _ = entry["file"], entry["bytes"], entry["checksum"], entry["samples"]
            named.shards.setdefault((convention["key"], entry["id"]), []).append(naming)
    except InputError as error:
        named.unreadable[path] = _without_path(error, path)
        return None
    except (KeyError, TypeError):
        named.unreadable[path] = "holds no manifest of shards"
        return None
    return manifest


def shard_files(store: Path) -> list[Path]:
    """All shards of all conventions, damaged ones that were set aside left out."""
    return sorted((store / "hidden_states").glob("*/*.safetensors"))


def find_shard(store: Path, name: str) -> Path:
    """The shard of this id, the beginning of an id, or this file; `InputError` when not one."""
    if Path(name).is_file():
        return Path(name)
    found = [p for p in shard_files(store) if p.stem.startswith(name)]
    if len(found) != 1:
        text = ", ".join(f"{p.parent.name}/{p.name}" for p in found[:5]) or "none"
        raise InputError(
            f"{name}: expected the id of one shard in {store / 'hidden_states'}, or the beginning "
            f"of one, or a file; found {text}"
        )
    return found[0]


def summarize_shard(path: Path, named: Named) -> dict[str, Any]:
    """Counts of a shard: `id`, `samples`, `tokens`, `bytes`, `raw_bytes`, `ratio`, `runs`.

    Only the header is read. A shard that does not open has `error` instead of the counts.
    """
    about: dict[str, Any] = {
        "id": path.stem,
        "bytes": _bytes(path),
        "runs": named.runs(path.parent.name, path.stem),
    }
    try:
        with Shard(path) as shard:
            tokens = sum(entry["tokens"] for entry in shard.samples)
            about["samples"] = len(shard.samples)
            convention = shard.convention
    except AerieError as error:
        return {**about, "error": _without_path(error, path)}
    raw = tokens * convention.bytes_per_token()
    return {
        **about,
        "tokens": tokens,
        "raw_bytes": raw,
        "ratio": about["bytes"] / max(1, raw),
        "verifier": convention.fingerprint,
        "layer_ids": list(convention.layer_ids),
        "hidden_size": convention.hidden_size,
        "format": convention.format,
    }


# Verifying


@dataclass
class Finding:
    """What is wrong with a file, and how to repair it (empty: nothing is to be done to it).

    `damaged`: the file itself must go; else it is whole, or it could not be told. `stale`:
    manifests that are wrong.
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
            steps.append("start the run again: what is missing is made anew")
        if any(m.parent.name == IMPORTS for m in self.stale):
            steps.append("what was imported is imported again")
        return ", ".join(steps)


def verify_shard(path: Path, named: Named) -> tuple[int, Finding | None]:
    """Read every sample of a shard and compare it with its checksum, its name and the manifests.

    Returns the tokens read, and what is wrong (None: nothing).
    """
    key = path.parent.name
    namings = named.shards.get((key, path.stem), [])
    manifests = sorted({n.manifest for n in namings})
    tokens = 0
    problems: list[str] = []
    try:
        with Shard(path) as shard:
            problems += _wrong_place(shard, path, namings)
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
                    problems.append(_without_path(error, path))
    except UnusableStates as error:
        problems.append(_without_path(error, path))
    except InputError as error:  # of another version, or not to be read: not ours to judge
        return 0, Finding(path, [_without_path(error, path)], False, [])
    if problems:
        return tokens, Finding(path, problems, True, _of_imports(manifests))
    stale = sorted({n.manifest for n in namings if _differs(path, n)})
    if stale:
        text = "its samples are whole, but size or checksum of the file are not those of " + (
            ", ".join(map(str, stale))
        )
        return tokens, Finding(path, [text], False, stale)
    return tokens, None


def _differs(path: Path, naming: Naming) -> bool:
    entry = naming.entry
    return path.stat().st_size != entry["bytes"] or file_checksum(path) != entry["checksum"]


def _without_path(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")


def _wrong_place(shard: Shard, path: Path, namings: list[Naming]) -> list[str]:
    """What contradicts the shard's name and its folder's."""
    problems = []
    key = path.parent.name
    found = shard.convention
    if found.key != key:
        problems.append(f"foreign: it belongs to convention {found.key}, its folder is {key}")
    for naming in namings:
        said = naming.convention
        if said["verifier"] != found.fingerprint or said["layer_ids"] != list(found.layer_ids):
            problems.append(f"{naming.manifest} gives the folder another verifier or layer ids")
    # A shard from which samples were left out bears the name of all that it should hold.
    left_out = read_optional(path.with_suffix(".json")).get("left_out")
    renamed = shard.name != path.stem
    if renamed or (not left_out and shard_id(e["key"] for e in shard.samples) != path.stem):
        problems.append("foreign: its samples are not those of its name")
    return problems


def missing_shards(store: Path, named: Named) -> list[Finding]:
    """Shards that a manifest names and that are not there."""
    found = []
    for (key, _), namings in sorted(named.shards.items()):
        path = store / "hidden_states" / key / namings[0].entry["file"]
        if not os.path.lexists(path):
            stale = _of_imports({n.manifest for n in namings})
            found.append(Finding(path, ["missing, though a manifest names it"], True, stale))
    return found


def _of_imports(manifests: Iterable[Path]) -> list[Path]:
    return sorted(m for m in manifests if m.parent.name == IMPORTS)


def set_aside(finding: Finding) -> None:
    """Do what `Finding.repair` says, so that the next run makes the shard again.

    The workflow compares a lane's manifest with the store, and a lane runs again when a shard or
    the manifest is gone. Of an import's manifest only the entry goes: its other shards are named
    by nothing else.
    """
    if finding.damaged and os.path.lexists(finding.path):
        Store.set_aside(finding.path)
    for path in finding.stale:
        if path.parent.name != IMPORTS:
            path.unlink(missing_ok=True)
            continue
        manifest = read_json(path)
        manifest["shards"] = [e for e in manifest["shards"] if e["file"] != finding.path.name]
        write_json(path, manifest)


# Collecting what nobody needs


@dataclass
class Garbage:
    path: Path
    bytes: int
    why: str


def find_garbage(store: Path, named: Named) -> list[Garbage]:
    """Files of the store that can be deleted: see docs/runbook.md for what counts as such.

    Shards are among them only when every run is finished and every manifest can be read: an
    extraction may copy samples out of shards that no manifest names any more.
    """
    found = []
    all_known = not named.unfinished and not named.unreadable
    if all_known:
        for path in shard_files(store):
            if not named.runs(path.parent.name, path.stem):
                found.append(Garbage(path, _bytes(path), "no manifest names it"))
    doomed = {g.path for g in found}
    for path in sorted(store.glob("hidden_states/*/*.json")):
        shard = path.with_suffix(".safetensors")
        named_so = not all_known or named.runs(path.parent.name, path.stem)
        if shard in doomed or not (shard.exists() or (named_so and nothing_kept(shard))):
            found.append(Garbage(path, _bytes(path), "it lay beside a shard"))
    for pattern in (f"hidden_states/*/{QUARANTINE}/*", "answers/*/*.damaged"):
        for path in sorted(store.glob(pattern)):
            found.append(Garbage(path, _bytes(path), "damaged, was set aside"))
    for path in sorted(_stale_temporaries(store)):
        found.append(Garbage(path, _bytes(path), "temporary, left by a killed process"))
    return found


def _stale_temporaries(store: Path) -> Iterator[Path]:
    """Temporary files of `files.atomic_write`, leases and folders of a verifier's import.

    Stale when untouched for a day, or when the process whose id they bear has ended. Processes
    of other machines cannot be seen, so such a file must also be untouched for an hour.
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


def _bytes(path: Path) -> int:
    """Of a file or folder; 0 for what is gone, or a link to nothing."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size if path.exists() else 0
