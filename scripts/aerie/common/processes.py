"""Processes: whether one is alive, and waiting for blocked signals."""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_libc = ctypes.CDLL(None)


class ProcessId(NamedTuple):
    """A process of this machine, distinct from later ones that get the same number.

    `started`: clock ticks from the boot to its start (proc(5), /proc/pid/stat, field 22).
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has this number now; None without one, and for a zombie."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if fields[0] == "Z" else cls(pid, int(fields[19]))
        except (OSError, IndexError, ValueError):
            return None

    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    @property
    def start_time(self) -> float:
        """When it was started, Unix seconds."""
        return psutil.boot_time() + self.started / os.sysconf("SC_CLK_TCK")


def next_signal(signals: Iterable[int], seconds: float) -> int | None:
    """The first of these blocked signals that arrives within `seconds` or is already pending; None
    when none does.

    Replaces `signal.sigtimedwait`, which returns whatever its memory holds when the process was
    stopped (Ctrl-Z, SIGSTOP, a debugger) and the time ran out before it continued.
    """
    wanted = (ctypes.c_ulong * 16)(sum(1 << (number - 1) for number in set(signals)))
    time = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
    number = int(_libc.sigtimedwait(wanted, None, time))
    return number if number > 0 else None
