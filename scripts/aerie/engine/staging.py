"""Staging folders: where captured states stay until they are in a shard, in memory if they fit.

A killed process cannot clean up, and /dev/shm outlives it. So each folder contains a file that its
process locks while it lives, and the next process removes folders whose lock is free. On a file
system without locks nothing is removed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

import psutil

from aerie.common.errors import InputError

MEMORY = Path("/dev/shm")
PREFIX = "aerie-states-"
MIN_BYTES = 1 << 30


class Staging:
    """A folder for at most `limit` bytes of states (at least `MIN_BYTES`), removed on close.

    It is in memory if `limit` fits into half of the free part of /dev/shm and a quarter of the
    free memory, else on disk (`TMPDIR`). Raises `InputError` with the sizes if neither has room.
    """

    def __init__(self, limit: int = MIN_BYTES):
        self.limit = max(limit, MIN_BYTES)
        disk = Path(tempfile.gettempdir())
        for place in {MEMORY, disk}:
            remove_abandoned(place)
        place = MEMORY if _memory_for(self.limit) else disk
        free = shutil.disk_usage(place).free
        if free < self.limit:
            raise InputError(
                f"{place}: captured states are staged here and need up to "
                f"{self.limit / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free. Free some "
                "space, set TMPDIR to a larger folder, or lower hidden_states.samples_per_shard"
            )
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
        # Renamed after locking, so that nobody finds it under this name unlocked.
        self._lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_WRONLY, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.folder / ".lock", self.folder / "lock")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory_for(limit: int) -> bool:
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < 2 * limit:
        return False
    return psutil.virtual_memory().available >= 4 * limit


def remove_abandoned(place: Path) -> list[Path]:
    """Remove and return the staging folders in `place` whose process is gone."""
    removed = []
    for folder in place.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDONLY)
        except OSError:
            continue  # not complete yet, or another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use, or the file system has no locks
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(lock)
    return removed
