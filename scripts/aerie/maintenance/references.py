"""Which shards the runs refer to.

The runs are the folders in one or more folders of results. A run refers to the shards in its
lanes' manifests (`hidden_states/lane-*.json`) and, before and while they are extracted, to those
in `samples/shards.json`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from aerie.common.errors import InputError
from aerie.common.files import read_json
from aerie.samples.shards import ShardList
from aerie.states.manifest import ImportManifest, LaneManifest, ManifestConvention, ShardEntry

IMPORTS = "imports"
"""Folder of the store with the manifests of imported shards."""


@dataclass
class Reference:
    """One manifest's entry for a shard."""

    run: str
    manifest: Path
    convention: ManifestConvention
    entry: ShardEntry


@dataclass
class References:
    """What the runs refer to.

    `shards`: by (convention's key, shard id). `wanted`: shards of `samples/shards.json` that no
    lane of that run lists, by id: the run, and the samples' ids. `unfinished`: runs whose needs
    are not known yet, with the reason. `unreadable`: damaged manifests, with the reason.
    """

    shards: dict[tuple[str, str], list[Reference]] = field(default_factory=dict)
    wanted: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)

    def runs(self, key: str, shard: str) -> list[str]:
        """Names of the runs (and imports) that refer to this shard."""
        found = {r.run for r in self.shards.get((key, shard), [])}
        return sorted(found | {run for run, _ in self.wanted.get(shard, [])})


def results_folders(store: Path, results: list[Path] | None) -> list[Path]:
    """Folders of the runs that may use the store: `results`, else the one that holds the store.

    Raises `InputError` for a folder that does not exist.
    """
    for place in results or []:
        if not place.is_dir():
            raise InputError(f"--results {place}: no such folder")
    beside = store.parent
    return results or [beside if beside.name == "results" else Path("results")]


def read_references(store: Path, results: list[Path]) -> References:
    """Read the manifests of all runs in the folders `results`, and of the imports in `store`.

    Raises `InputError` for a folder that is itself a run: no run would be found in it, and its
    shards would look unused.
    """
    references = References()
    for place in results:
        if _is_run(place):
            raise InputError(f"{place}: the folder of a run; expected the one that holds runs")
    for folder in sorted(p for place in results for p in place.glob("*") if p.is_dir()):
        if folder.resolve() != store.resolve():
            read_run(folder, references)
    for path in sorted((store / IMPORTS).glob("*.json")):
        _read_manifest(path, ImportManifest, "(import)", references)
    return references


def _is_run(folder: Path) -> bool:
    parts = ("prompts", "responses", "samples", "hidden_states")
    return any((folder / part).is_dir() for part in parts)


def read_run(folder: Path, references: References) -> None:
    """Add what the run in this folder refers to; nothing when the folder is not a run's."""
    if not _is_run(folder):
        return
    listed: set[str] = set()
    quarantined: set[str] = set()
    for path in sorted(folder.glob("hidden_states/lane-*.json")):
        manifest = _read_manifest(path, LaneManifest, folder.name, references)
        if isinstance(manifest, LaneManifest):
            listed |= {entry.id for entry in manifest.shards}
            quarantined |= set(manifest.quarantined)
    path = folder / "samples/shards.json"
    if not path.is_file():
        references.unfinished[str(folder)] = "samples/shards.json is not there"
        return
    try:
        shards = ShardList.read(path).shards
    except InputError as error:
        references.unreadable[path] = without_path(error, path)
        return
    unlisted = {s.id: s.samples for s in shards if s.id not in listed}
    for identity, samples in unlisted.items():
        references.wanted.setdefault(identity, []).append((folder.name, samples))
    # Of a shard whose samples are all quarantined nothing was kept, so no lane lists it.
    waiting = [i for i, s in unlisted.items() if not set(s) <= quarantined]
    if waiting:
        references.unfinished[str(folder)] = f"{len(waiting)} shards are not extracted yet"
    elif (folder / "responses").is_dir() and not (folder / "responses/manifest.json").is_file():
        references.unfinished[str(folder)] = "responses/manifest.json is not there"


def _read_manifest(
    path: Path,
    kind: type[LaneManifest] | type[ImportManifest],
    run: str,
    references: References,
) -> LaneManifest | ImportManifest | None:
    try:
        content = read_json(path)
    except InputError as error:
        references.unreadable[path] = without_path(error, path)
        return None
    try:
        manifest = kind.parse(content, path)
    except InputError:
        references.unreadable[path] = "holds no manifest of shards"
        return None
    convention = manifest.convention
    for entry in manifest.shards:
        reference = Reference(run, path, convention, entry)
        references.shards.setdefault((convention.key, entry.id), []).append(reference)
    return manifest


def without_path(error: Exception, path: Path) -> str:
    """The error's message without the path at its start, for lists that name the path already."""
    return str(error).removeprefix(f"{path}: ")
