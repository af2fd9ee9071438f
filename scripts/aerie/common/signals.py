"""Waiting for signals that are blocked."""

import ctypes
from collections.abc import Iterable

_libc = ctypes.CDLL(None)


def next_signal(signals: Iterable[int], seconds: float) -> int | None:
    """The first of these signals that comes within so many seconds, or came before; None: none did.

    In the place of `signal.sigtimedwait`, which gives whatever its memory holds when the process
    was stopped (Ctrl-Z, SIGSTOP, a debugger) and the time was over before it went on.
    """
    wanted = (ctypes.c_ulong * 16)(sum(1 << (number - 1) for number in set(signals)))
    time = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
    number = _libc.sigtimedwait(wanted, None, time)
    return number if number > 0 else None
