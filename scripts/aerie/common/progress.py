"""Progress of a long job: a bar in a terminal, JSON lines in its log folder."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PHASES = ("loading", "compiling", "working", "waiting", "validating", "saving", "finishing")
"""What a job can be at. Only while it is `working` is it expected to get on at a steady pace."""


class JobProgress:
    """Counts done work of a known total; at most one JSON line a second, and one a phase.

    `log`: file of JSON lines with `time` (Unix seconds), `stage`, `phase`, `done`, `total`,
    `unit`, `rate` (units per second of work, without loading), `beats` and what `update` was
    given besides. None: no file.
    """

    def __init__(
        self, stage: str, total: int, unit: str, log: Path | None = None, phase: str = "working"
    ):
        self.stage, self.total, self.unit, self.phase = stage, total, unit, phase
        self.done = self.beats = 0
        self.start = self._last = time.monotonic()
        self._done_at_start = 0
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._file = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._file = log.open("a", encoding="utf-8")
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(stage, total=total, note="")
        self._bar.start()
        self._write()

    def enter(self, phase: str) -> None:
        """Say what the job is at from now on, one of `PHASES`."""
        if phase == self.phase:
            return
        if self.phase in ("loading", "compiling"):
            self.start, self._done_at_start = time.monotonic(), self.done
        self.phase = phase
        self._write()

    def begin(self, done: int, total: int) -> None:
        """Set what was done before, and the total that was not known at first."""
        self.done = self._done_at_start = done
        self.total = total
        self._bar.update(self._task, completed=done, total=total)

    def update(self, done: int, note: str = "", **values: Any) -> None:
        self.done, self._values = done, values
        self._bar.update(self._task, completed=done, note=note)
        if time.monotonic() - self._last >= 1 or done == self.total:
            self._write()

    def beat(self, count: int = 1) -> None:
        """Tell of work within a unit (an engine's step, a validated batch), so that it shows.

        From any thread.
        """
        with self._lock:
            self.beats += count
        if time.monotonic() - self._last >= 1:
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._last = time.monotonic()
            if self._file is None:
                return
            seconds = max(self._last - self.start, 1e-9)
            line = {
                "time": round(time.time(), 1),
                "stage": self.stage,
                "phase": self.phase,
                "done": self.done,
                "total": self.total,
                "unit": self.unit,
                "rate": round((self.done - self._done_at_start) / seconds, 3),
                "beats": self.beats,
                **self._values,
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._bar.stop()
        if self._file is not None:
            self.enter("finishing")
            self._file.close()

    def __enter__(self) -> "JobProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
