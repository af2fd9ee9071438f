"""Reading files that others write, move or damage meanwhile."""

from pathlib import Path


def modified(path: Path) -> float | None:
    """When it was changed, Unix seconds; None when it does not exist or cannot be looked at."""
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return None


def read_tail(path: Path, size: int) -> str:
    """The last `size` bytes of a file as text, from the start of a line; empty when it cannot be
    read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size))
            data = file.read(size)
    except OSError:
        return ""
    if end > size:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")
