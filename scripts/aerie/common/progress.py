"""Progress of a long job: a bar in a terminal, JSON lines in its log folder."""

import json
import math
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from aerie.common.records import Record

PHASES = ("loading", "compiling", "working", "waiting", "validating", "saving", "finishing")
"""What a job can be doing. Only while `working` is it expected to progress at a steady pace."""


def _finite(value: float) -> float:
    try:
        if math.isfinite(value):
            return value
    except OverflowError:
        pass
    raise ValueError("expected a finite number")


Number = Annotated[int | float, AfterValidator(_finite)]


class ProgressLine(Record):
    """A line of `<part>.progress.jsonl`. A job that continues appends to the file."""

    model_config = ConfigDict(extra="allow")

    time: Number | None = None
    """Unix seconds."""
    stage: str | None = None
    """The rule."""
    phase: str = "working"
    """`loading`, `compiling`, `working`, `waiting` (for the answers of endpoints, or for what
    another run computes), `validating`, `saving` or `finishing`."""
    done: Number | None = None
    """Units done."""
    total: Number | None = None
    """Units to do."""
    unit: str | None = None
    """What is counted, such as `steps`."""
    rate: Number | None = None
    """Units a second, without the loading."""
    beats: Number | None = None
    """Steps within units: requests of an engine's steps, batches of a validation."""
    loss: float | None = None
    """Of a training; may be NaN."""
    accuracy: list[float] | None = None
    """Of a training, one a TTT step; may hold NaN."""


class JobProgress:
    """Counts done work of a known total; writes at most one `ProgressLine` a second, and one for
    each phase.

    `log`: file of JSON lines; None: no file.
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
        """Set what the job does from now on, one of `PHASES`."""
        if phase == self.phase:
            return
        if self.phase in ("loading", "compiling"):
            self.start, self._done_at_start = time.monotonic(), self.done
        self.phase = phase
        self._write()

    def begin(self, done: int, total: int) -> None:
        """Set what was done before, and a total that was not known at first."""
        self.done = self._done_at_start = done
        self.total = total
        self._bar.update(self._task, completed=done, total=total)

    def update(self, done: int, note: str = "", **values: Any) -> None:
        """Units done so far. `note` stands beside the bar; `values` go into the line."""
        self.done, self._values = done, values
        self._bar.update(self._task, completed=done, note=note)
        if time.monotonic() - self._last >= 1 or done == self.total:
            self._write()

    def beat(self, count: int = 1) -> None:
        """Show work within a unit (an engine's step, a validated batch). From any thread."""
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
            line = ProgressLine(
                time=round(time.time(), 1),
                stage=self.stage,
                phase=self.phase,
                done=self.done,
                total=self.total,
                unit=self.unit,
                rate=round((self.done - self._done_at_start) / seconds, 3),
                beats=self.beats,
                **self._values,
            )
            self._file.write(json.dumps(line.model_dump(exclude_unset=True)) + "\n")
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
