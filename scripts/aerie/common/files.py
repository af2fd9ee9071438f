"""Files that are whole or absent: temporary name, sync, rename; content hashes; JSON lines."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from aerie.common.errors import InputError


def is_disk_full(error: object) -> bool:
    """Whether an exception, or its text, says that there is no space (or no quota) left.

    Libraries written in Rust give it as text only: "(os error 28)".
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "errno", None) in numbers or any(
        f"os error {n})" in str(error) or f"[Errno {n}]" in str(error) for n in numbers
    )


def free_bytes(folder: Path) -> int:
    """Free on the disk that `folder` lies on, or will once it is made."""
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yield a temporary name beside `path`; sync and rename it to `path` when the block succeeds.

    A reader sees the old file or the new one, never a part. The temporary name starts with a
    dot and holds the process id, so two writers do not meet.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(
        prefix=f".{path.name}.{os.getpid()}.", suffix=".tmp", dir=path.parent
    )
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path | str, data: bytes) -> None:
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, text.encode() + b"\n")


def read_json(path: Path | str) -> Any:
    """Parsed JSON of `path`; an `InputError` names the file when it is absent or damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from error


def read_optional(path: Path | str) -> dict[str, Any]:
    """The JSON object in `path`, an empty one when there is none that can be read."""
    try:
        found = read_json(path)
    except InputError:
        return {}
    return found if isinstance(found, dict) else {}


def write_json_lines(path: Path | str, rows: Iterable[Any]) -> int:
    """Write rows as zstandard-compressed JSON lines with a checksum; return their number."""
    count = 0
    packer = zstandard.ZstdCompressor(level=3, write_checksum=True)
    with atomic_write(path) as temporary, temporary.open("wb") as raw:
        with packer.stream_writer(raw, closefd=False) as packed:
            for row in rows:
                packed.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                count += 1
        raw.flush()
    return count


def read_json_lines(path: Path | str) -> Iterator[Any]:
    """Rows of a zstandard-compressed JSON lines file; `InputError` when it is damaged or cut.

    The checksum stands at its end: none of the rows is to be relied on before the last has come.
    """
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    rest = b""
    try:
        with Path(path).open("rb") as raw:
            while block := raw.read(1 << 20):
                *lines, rest = (rest + unpacker.decompress(block)).split(b"\n")
                yield from map(json.loads, lines)
        if not unpacker.eof or rest:
            raise ValueError("it is cut short")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (zstandard.ZstdError, ValueError) as error:
        raise InputError(
            f"{path}: damaged ({error}); delete it and run again, it is made anew"
        ) from error


def digest(*parts: Any, size: int = 16) -> str:
    """Hash of JSON-like values as 2 x `size` hex digits (BLAKE2b); equal values, equal hash."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def digest_file(path: Path | str) -> str:
    """BLAKE2b of a file's bytes, 32 hex digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
