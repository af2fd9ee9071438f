"""Progress of a long job: a bar in a terminal, JSON lines in its log folder."""

import json
import sys
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


class JobProgress:
    """Counts done work of a known total; at most one JSON line a second.

    `log`: file of JSON lines with `time` (Unix seconds), `stage`, `done`, `total`, `unit`,
    `rate` (units per second) and what `update` was given besides. None: no file.
    """

    def __init__(self, stage: str, total: int, unit: str, log: Path | None = None):
        self.stage, self.total, self.unit = stage, total, unit
        self.done = 0
        self.start = self._last = time.monotonic()
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
        self._write({})

    def update(self, done: int, note: str = "", **values: Any) -> None:
        self.done = done
        self._bar.update(self._task, completed=done, note=note)
        now = time.monotonic()
        if now - self._last >= 1 or done == self.total:
            self._last = now
            self._write(values)

    def _write(self, values: dict[str, Any]) -> None:
        if self._file is None:
            return
        seconds = max(time.monotonic() - self.start, 1e-9)
        line = {
            "time": round(time.time(), 1),
            "stage": self.stage,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "rate": round(self.done / seconds, 3),
            **values,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._bar.stop()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "JobProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
