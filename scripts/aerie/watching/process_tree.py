"""The processes below this one: finding, reaping and ending them, and dying with a parent."""

import contextlib
import ctypes
import os
import signal
import time

import psutil

from aerie.common.processes import next_signal

GONE = signal.SIGUSR1  # to us: what started the job is gone or ending
SIGNALS = {signal.SIGCHLD, GONE}
# Those that our caller has us ignore (nohup) stay ignored; blocked ones would be received.
SIGNALS |= {
    s
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if signal.getsignal(s) is not signal.SIG_IGN
}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Have processes whose parent ends below this one become its children."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int, with_signal: int) -> None:
    """Have the kernel send this process a signal when `parent` dies."""
    _libc.prctl(PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


def descendants() -> list[psutil.Process]:
    """All processes below this one, adopted orphans included."""
    return psutil.Process().children(recursive=True)


def reap() -> dict[int, int]:
    """Ids of the children that ended since the last call, each with its `Popen.returncode`."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def exit_status(code: int) -> int:
    """A `Popen.returncode` as a shell reports it: 128 + the number of a signal."""
    return code if code >= 0 else 128 - code


def end_processes(grace: float, ended: dict[int, int] | None = None) -> list[int]:
    """Ask all descendants to end; kill what is left after `grace` seconds, or at a further signal
    to us. Returns their ids; adds how they ended to `ended`."""
    ended = {} if ended is None else ended
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while left := descendants():
        ended.update(reap())
        kill = time.monotonic() >= deadline
        for process in left:
            if process.pid in asked and not kill:
                continue
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
            asked.add(process.pid)
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
                # A stopped process handles a signal only when it continues.
                process.send_signal(signal.SIGCONT)
        if next_signal(SIGNALS, 0.1) not in (None, signal.SIGCHLD, GONE):
            deadline = min(deadline, time.monotonic())
        ended.update(reap())
        if time.monotonic() > deadline + 10:
            break  # nothing kills a process in state D
    return sorted(asked)
