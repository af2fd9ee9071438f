"""Leases: which process is making a thing of the store, so that no other makes it at the same time.

A lease is a small file beside the thing: created with O_EXCL, renewed by its holder every few
seconds, removed when the thing is complete. That needs no `flock` and works on NFS. On its own
machine a lease of an ended process is free at once; elsewhere it is free when nobody has renewed it
for a while. Clocks of two machines are never compared.

A lease saves work. Results are whole or absent and named by their content, so nothing is wrong when
two processes make the same one.

filelock's `SoftFileLease` (4.3.1) does not replace this: it never takes over an empty lease, which
a crash or a full disk leaves (`test_a_lease_cut_short_by_a_crash_expires`), treats a deleted lease
as lost instead of writing it again, and does not see those of earlier versions in a shared store.
"""

import contextlib
import json
import os
import platform
import secrets
import sys
import threading
import time
from pathlib import Path

from pydantic import ValidationError

from aerie.common.processes import ProcessId
from aerie.common.records import Record

RENEW_SECONDS = 5.0
EXPIRY_SECONDS = 90.0
"""A lease that was not renewed for so long, while another process watched it, is free."""
POLL_SECONDS = 1.0
"""Between two looks at a lease that a process waits for."""


class Lease(Record):
    """`.<name>.lease` beside a shard, a group of answers, a drafter's folder or a run. Its time of
    change is its last renewal."""

    machine: str = ""
    """Host, boot and pid namespace of the holder."""
    process: int | None = None
    """The holder's process id."""
    started: int | None = None
    """When the holder was started, clock ticks since the boot."""
    token: str = ""
    """Random, different for each holder."""

    def holder_has_ended(self) -> bool:
        """Whether this machine knows that the holder is gone."""
        if self.machine != this_machine():
            return False
        if self.process is None or self.started is None:
            return True
        return not ProcessId(self.process, self.started).is_alive()

    def __str__(self) -> str:
        machine = self.machine.split(" ")[0] or "an unknown machine"
        return f"process {'?' if self.process is None else self.process} on {machine}"


Found = tuple[str, int]
"""A lease as it was read: its text and its time of change, ns."""


def this_machine() -> str:
    """Names the place where a process id has its meaning: host, boot, pid namespace."""
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
        self._seen: dict[Path, tuple[Found, float]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, path: Path) -> bool:
        """Whether this process now has the lease of `path`. True where none can be written."""
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
        """Who has the lease of `path`, in words; None when it is free."""
        lease = lease_path(path)
        with self._lock:
            found = self._read(lease)
            return None if found is None else self._holder(lease, found)

    def alive(self, path: Path) -> str | None:
        """As `holder`, but certain: watches a lease of another machine until it is renewed or has
        expired."""
        lease = lease_path(path)
        first = self._read(lease)
        while True:
            with self._lock:
                found = self._read(lease)
                who = None if found is None else self._holder(lease, found)
            if who is None or found is None or found != first:
                return who
            if _parse(found[0]).machine == this_machine():
                return who
            time.sleep(POLL_SECONDS)

    def lost(self, path: Path) -> bool:
        """Whether another process has taken a lease of ours, because it was not renewed in time."""
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
        me = ProcessId.of(os.getpid())
        who = Lease(
            machine=this_machine(),
            process=os.getpid(),
            started=me and me.started,
            token=self._token,
        )
        try:
            lease.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(lease, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except OSError:
            return True
        with contextlib.suppress(OSError), os.fdopen(file, "w") as opened:
            json.dump(who.as_json(), opened)
        return True

    def _read(self, lease: Path) -> Found | None:
        """A lease as it is now; opened, so that NFS asks its server."""
        try:
            with lease.open(encoding="utf-8", errors="replace") as file:
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def _holder(self, lease: Path, found: Found) -> str | None:
        now = time.monotonic()
        before, since = self._seen.get(lease, (None, now))
        if before != found:
            self._seen[lease] = found, now
        elif now - since > EXPIRY_SECONDS:
            return None
        who = _parse(found[0])
        return None if who.holder_has_ended() else str(who)

    def _remove(self, lease: Path, found: Found) -> None:
        """Remove a lease as `found`, but none that was created since."""
        aside = lease.with_name(f"{lease.name}.{self._token}")
        with contextlib.suppress(OSError):
            os.rename(lease, aside)
            moved = self._read(aside)
            if moved is not None and moved[0] != found[0]:
                with contextlib.suppress(OSError):
                    os.link(aside, lease)  # fails when another was created meanwhile
            aside.unlink()

    def _give_up(self, leases: list[Path]) -> None:
        with self._lock:
            for lease in leases:
                if lease in self._held:
                    self._held.discard(lease)
                    found = self._read(lease)
                    if found and self._is_ours(found):
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
                    elif not self._is_ours(found):
                        self._lost.add(lease)
                    else:
                        with contextlib.suppress(OSError):
                            os.utime(lease)

    def _is_ours(self, found: Found) -> bool:
        return _parse(found[0]).token in ("", self._token)


def _parse(text: str) -> Lease:
    """What a lease says; nothing when a crash or a full disk cut it short."""
    try:
        return Lease.model_validate_json(text)
    except ValidationError:
        return Lease()


def find_running(results: Path) -> tuple[Path, str] | None:
    """A run in the folder `results` that a Snakemake works on, here or on another machine, and
    which process that is; None when there is none. Takes up to `EXPIRY_SECONDS` for a run that was
    killed on another machine."""
    leases = Leases()
    for lease in sorted(results.glob("*/.run.lease")):
        run = lease.parent / "run"
        if who := leases.holder(run):
            print(f"{lease.parent}: checking whether {who} is working on it ...", file=sys.stderr)
        if who := leases.alive(run):
            return lease.parent, who
    return None
