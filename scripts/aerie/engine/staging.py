"""Where an engine leaves captured states until they are in a shard: in memory where there is room.

A killed process cannot tidy up, and /dev/shm outlives it. So each folder holds a lock for as long
as its process lives, and whoever makes the next one removes those whose lock is free. On a file
system without locks none is removed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from aerie.common.errors import InputError

MEMORY = Path("/dev/shm")
PREFIX = "aerie-states-"
LEAST_BYTES = 1 << 30


class Staging:
    """A folder for at most `limit` bytes of states, gone when it is closed.

    It lies in memory when half of /dev/shm and a quarter of the free memory hold `limit` bytes,
    else on disk (`TMPDIR`). `limit`: what its user may leave in it at a time, at least
    `LEAST_BYTES`. Raises `InputError` with the figures when neither has room.
    """

    def __init__(self, limit: int = LEAST_BYTES):
        self.limit = max(limit, LEAST_BYTES)
        disk = Path(tempfile.gettempdir())
        for place in {MEMORY, disk}:
            remove_abandoned(place)
        place = MEMORY if _memory_for(self.limit) else disk
        free = shutil.disk_usage(place).free
        if free < self.limit:
            raise InputError(
                f"states wait in {place} until they are in a shard; that takes up to "
                f"{self.limit / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free. Make room, "
                "set TMPDIR to a folder that has it, or lower hidden_states.samples_per_shard"
            )
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
        # Locked before it has its name: whoever finds the name finds it locked.
        self._lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_WRONLY, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.folder / ".lock", self.folder / "lock")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory_for(limit: int) -> bool:
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < 2 * limit:
        return False
    return psutil.virtual_memory().available >= 4 * limit


def remove_abandoned(place: Path) -> list[Path]:
    """Remove the staging folders in `place` whose process is gone; give their names."""
    removed = []
    for folder in place.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDONLY)
        except OSError:
            continue  # being made, or somebody else's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # somebody's, or there are no locks here
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(lock)
    return removed
