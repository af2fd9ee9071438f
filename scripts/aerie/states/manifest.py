"""Manifests: which shards a lane or an import made. Light: the rules import it on every dry run."""

from pathlib import Path

from pydantic import Field

from aerie.common.errors import InputError
from aerie.common.records import Record
from aerie.states.convention import Convention


class ManifestConvention(Record):
    """The convention of a manifest's shards."""

    key: str
    """Name of the folder in `results/store/hidden_states`."""
    verifier: str
    """Fingerprint of the verifier."""
    layer_ids: list[int]
    """All captured layers, sorted; the last one is the number of layers."""
    hidden_size: int
    """Width of a state."""
    format: str
    """`lossless`, `raw` or `fp8`."""
    last_layer: str = "before the final norm"
    """What the last layer's states are."""
    last_state: str = "all"
    """`all` or `supervised`; of an import, whether the length of the last states was lost."""

    @classmethod
    def of(cls, convention: Convention, last_state: str | None = None) -> "ManifestConvention":
        return cls(
            key=convention.key,
            verifier=convention.fingerprint,
            layer_ids=list(convention.layer_ids),
            hidden_size=convention.hidden_size,
            format=convention.format,
            last_state=last_state or convention.last_state,
        )

    @property
    def aux_layer_ids(self) -> list[int]:
        """The layers that feed the drafter: all but the last."""
        return self.layer_ids[:-1]


class ShardEntry(Record):
    """One shard of a manifest."""

    id: str
    """Hash of the samples' keys."""
    file: str
    """Its name in the convention's folder."""
    samples: list[str]
    """Ids of its samples, in the order of the file."""
    tokens: int
    """Of all its samples."""
    bytes: int
    """Size of the file."""
    checksum: str
    """xxh3-64 of the file, hexadecimal."""


class LaneShard(ShardEntry):
    """One shard of a lane."""

    split: str
    """`train` or `heldout`."""


class LaneManifest(Record):
    """`hidden_states/lane-<i>.json`: the lane's shards and what was left out.

    The samples of the shards and `quarantined` together are the lane's share of
    `samples/shards.json`.
    """

    convention: ManifestConvention
    """What determines the states, and how they are stored."""
    shards: list[LaneShard]
    """The shards that exist; one of which nothing was kept is not listed."""
    samples: int
    """In all shards."""
    tokens: int
    """In all shards."""
    raw_bytes: int
    """Of all states in bf16."""
    omitted_bytes: int = 0
    """Of those that `last_state: supervised` leaves out."""
    bytes: int
    """Of the shards' files."""
    extracted_samples: int = 0
    """Computed by this lane's engine in its last run."""
    extracted_tokens: int = 0
    """Of the extracted samples."""
    adopted_samples: int = 0
    """Made by another run meanwhile."""
    copied_samples: int = 0
    """Copied from other shards."""
    quarantined: dict[str, str] = Field(default_factory=dict)
    """Samples that the lane's shards lack, whoever left them out and when: id → reason."""
    seconds: float = 0.0
    """That the lane took."""


class ImportManifest(Record):
    """`results/store/imports/<hash>.json`: shards made of another tool's files in one folder."""

    convention: ManifestConvention
    """As in a lane's manifest."""
    source: str
    """The folder."""
    shards: list[ShardEntry]
    """All shards that were made of its files, by earlier imports too."""
    samples: int
    """In all shards."""
    tokens: int
    """In all shards."""
    refused: dict[str, str] = Field(default_factory=dict)
    """Files that the last import refused: name → reason."""


def broken_shards(manifest: Path, store: Path) -> list[str]:
    """Files that a lane's manifest names and that are gone from the store, or of another size.

    An absent manifest names none. One that cannot be read is itself the broken file.
    """
    try:
        lane = LaneManifest.read(manifest)
    except InputError:
        return [manifest.name] if manifest.exists() else []
    folder = store / "hidden_states" / lane.convention.key
    wanted = {entry.file: entry.bytes for entry in lane.shards}
    return [name for name, size in wanted.items() if _size(folder / name) != size]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
