"""Leases: who makes a thing of the store now, so that nobody makes it a second time beside them.

A lease is a small file beside the thing: made with O_EXCL, renewed by its holder every few seconds,
removed when the thing is there. That needs no `flock` and works on NFS. A holder that is gone is
seen at once on its own machine, elsewhere by a lease that is no longer renewed. The clocks of two
machines are never compared.

A lease saves work; what is made is whole or absent and named by its content, so nothing is wrong
when two make it all the same.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from pathlib import Path
from typing import Any

RENEW_SECONDS = 5.0
EXPIRY_SECONDS = 90.0
"""A lease that was not renewed for so long, while somebody looked, is nobody's."""
POLL_SECONDS = 1.0
"""Between two looks at a lease that is waited for."""


def this_machine() -> str:
    """Names the place where a process id means what it means here: host, boot, pid namespace."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def lease_path(path: Path) -> Path:
    """The lease of what is, or will be, at `path`."""
    return path.with_name(f".{path.name}.lease")


class Leases:
    """The leases that this process holds, renewed by a thread until they are released."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self._held: set[Path] = set()
        self._lost: set[Path] = set()
        self._seen: dict[Path, tuple[tuple[str, int], float]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, path: Path) -> bool:
        """Whether the lease of `path` is ours now. Where none can be written, it is."""
        lease = lease_path(path)
        with self._lock:
            if lease in self._held:
                return True
            found = self._read(lease)
            if found is not None:
                if self._holder(lease, found) is not None:
                    return False
                self._remove(lease, found)
            if not self._create(lease):
                return False
            self._held.add(lease)
            self._lost.discard(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
                self._thread.start()
            return True

    def holder(self, path: Path) -> str | None:
        """Who has the lease of `path`, in words; None when nobody has it any more."""
        lease = lease_path(path)
        with self._lock:
            found = self._read(lease)
            return None if found is None else self._holder(lease, found)

    def alive(self, path: Path) -> str | None:
        """As `holder`, but sure of it: for another machine's lease, looks until it is renewed or
        has expired."""
        lease = lease_path(path)
        first = self._read(lease)
        while True:
            with self._lock:
                found = self._read(lease)
                who = None if found is None else self._holder(lease, found)
            if who is None or found != first:
                return who
            if _parse(found[0]).get("machine") == this_machine():
                return who
            time.sleep(POLL_SECONDS)

    def lost(self, path: Path) -> bool:
        """Whether a lease we took is another's now: we were not heard of for too long."""
        return lease_path(path) in self._lost

    def release(self, path: Path) -> None:
        self._give_up([lease_path(path)])

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._give_up(list(self._held))

    def __enter__(self) -> "Leases":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Files

    def _create(self, lease: Path) -> bool:
        who = {
            "machine": this_machine(),
            "process": os.getpid(),
            "started": _started(os.getpid()),
            "token": self._token,
        }
        try:
            lease.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(lease, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except OSError:
            return True
        with contextlib.suppress(OSError), os.fdopen(file, "w") as opened:
            json.dump(who, opened)
        return True

    def _read(self, lease: Path) -> tuple[str, int] | None:
        """Text and time of change (ns) of a lease; opened, so that NFS asks its server."""
        try:
            with lease.open(encoding="utf-8", errors="replace") as file:
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def _holder(self, lease: Path, found: tuple[str, int]) -> str | None:
        now = time.monotonic()
        before, since = self._seen.get(lease, (None, now))
        if before != found:
            self._seen[lease] = found, now
        elif now - since > EXPIRY_SECONDS:
            return None
        who = _parse(found[0])
        if who.get("machine") == this_machine() and not _runs(who):
            return None
        machine = str(who.get("machine", "an unknown machine")).split(" ")[0]
        return f"process {who.get('process', '?')} on {machine}"

    def _remove(self, lease: Path, found: tuple[str, int]) -> None:
        """Remove a lease as `found`, and no other that came since."""
        aside = lease.with_name(f"{lease.name}.{self._token}")
        with contextlib.suppress(OSError):
            os.rename(lease, aside)
            moved = self._read(aside)
            if moved is not None and moved[0] != found[0]:
                with contextlib.suppress(OSError):
                    os.link(aside, lease)  # fails when there is yet another
            aside.unlink()

    def _give_up(self, leases: list[Path]) -> None:
        with self._lock:
            for lease in leases:
                if lease in self._held:
                    self._held.discard(lease)
                    found = self._read(lease)
                    if found and _parse(found[0]).get("token", self._token) == self._token:
                        with contextlib.suppress(OSError):
                            lease.unlink()

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            with self._lock:
                for lease in self._held:
                    found = self._read(lease)
                    if found is None:
                        if not self._create(lease):
                            self._lost.add(lease)
                    elif _parse(found[0]).get("token", self._token) != self._token:
                        self._lost.add(lease)
                    else:
                        with contextlib.suppress(OSError):
                            os.utime(lease)


def _parse(text: str) -> dict[str, Any]:
    """What a lease says; nothing when its holder died, or the disk was full, while it was made."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _runs(who: dict[str, Any]) -> bool:
    """Whether the process lives and is no other that was given its number since."""
    started = _started(who.get("process"))
    return started is not None and started == who.get("started")


def _started(process: Any) -> int | None:
    """When a process was started, in clock ticks since the boot; None when it has ended.

    Source: proc(5), /proc/pid/stat, fields 3 and 22.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
