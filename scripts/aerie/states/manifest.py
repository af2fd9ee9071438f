"""What a lane's manifest promises, compared with what lies in the store; light enough to be asked
whenever the workflow is read."""

from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import read_json


def broken_shards(manifest: Path, store: Path) -> list[str]:
    """Files that the manifest names and that are gone from the store, or have another size there.

    A manifest that is absent breaks nothing; of one that cannot be read, its own name is given.
    """
    try:
        lane: dict[str, Any] = read_json(manifest)
    except InputError:
        return [manifest.name] if manifest.exists() else []
    try:
        if not lane.get("shards"):
            return []
        wanted = {entry["file"]: entry["bytes"] for entry in lane["shards"]}
        folder = store / "hidden_states" / lane["convention"]["key"]
    except (AttributeError, KeyError, TypeError):
        return [manifest.name]
    return [name for name, size in wanted.items() if _size(folder / name) != size]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
