"""Copying a job's output into its log."""

import contextlib
import os
import re
import threading
import time
from collections import deque
from pathlib import Path

BAR_SECONDS = 10.0  # between two lines of a progress bar in the log
LONGEST_LINE = 1 << 16  # bytes
LONGEST_LOG = 1 << 26  # bytes of output that a log takes; what comes after is judged but not kept
JUDGED_LINES = 2000  # between two calls of `take`; of a flood the last ones
JUDGED_BYTES = 1 << 12  # of a line
LAST_LINES = 20
BAR = re.compile(rb"\d%|\d/\d|\dit/s|\ds/it")


class Pump(threading.Thread):
    """Copies a job's output into its log: lines get their time, progress bars are folded.

    Never stops for a log that cannot be written: the job would hang. A job that floods its output
    fills neither memory nor disk. `skipped`: lines that `take` did not return, because there were
    too many; `full`: the log has reached `LONGEST_LOG`.
    """

    def __init__(self, source: int, log: Path):
        super().__init__(name="pump", daemon=True)
        self.source = source
        self.log = log.open("wb", buffering=0)
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self.skipped = 0
        self.full = False
        self._fresh: deque[str] = deque(maxlen=JUDGED_LINES)
        self._written = 0
        self._rest = b""
        self._bar_shown = 0.0
        self._lock = threading.Lock()

    def run(self) -> None:
        while data := os.read(self.source, 1 << 16):
            *lines, rest = (self._rest + data).split(b"\n")
            lines = [part for line in lines for part in fold(line)]
            if b"\r" in rest:
                *drawn, rest = rest.split(b"\r")
                *others, bar = fold(b"\r".join(drawn))
                lines += others
                if not BAR.search(bar) or time.monotonic() - self._bar_shown >= BAR_SECONDS:
                    self._bar_shown = time.monotonic()
                    lines += [bar] * bool(bar)
            if len(rest) > LONGEST_LINE:
                lines.append(rest)
                rest = b""
            self._rest = rest
            self.write(lines)
        if self._rest:
            self.write(fold(self._rest))

    def write(self, lines: list[bytes], own: bool = False) -> None:
        """`own`: lines of the supervisor, which are always kept and never judged."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ").encode()
        if own:
            stamp += b"supervisor: "
        with self._lock:
            if own or not self.full:
                with contextlib.suppress(OSError):
                    data = b"".join(stamp + line + b"\n" for line in lines)
                    self._written += self.log.write(data)
            if own:
                return
            if not self.full and self._written > LONGEST_LOG:
                self.full = True
                note = f"supervisor: the log has {LONGEST_LOG >> 20} MiB, no more of it is kept\n"
                with contextlib.suppress(OSError):
                    self.log.write(stamp + note.encode())
            texts = [line[:JUDGED_BYTES].decode(errors="replace") for line in lines]
            self.last.extend(texts)
            self.skipped += max(len(self._fresh) + len(texts) - JUDGED_LINES, 0)
            self._fresh.extend(texts)

    def say(self, text: str) -> None:
        """Write lines of the supervisor."""
        self.write(text.encode().split(b"\n"), own=True)

    def take(self) -> list[str]:
        """Lines since the last call."""
        with self._lock:
            fresh = list(self._fresh)
            self._fresh.clear()
        return fresh


def fold(line: bytes) -> list[bytes]:
    """The final state of a line that a progress bar overwrote with carriage returns; overwritten
    text that is no bar comes before it."""
    if b"\r" not in line:
        return [line]
    *over, last = [part for part in line.split(b"\r") if part.strip()] or [b""]
    return [*(part for part in over if not BAR.search(part)), last]
