"""Following the progress that a job writes."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from aerie.common.progress import ProgressLine

RATE_LINES = 600  # signs of progress that the rate is computed from


class ProgressReader:
    """Reads the lines that a job adds to its progress file.

    `latest`: the last value of each key.
    """

    def __init__(self, path: Path):
        self.path = path
        self.latest: ProgressLine | None = None
        self._offset = path.stat().st_size if path.is_file() else 0
        self._partial = b""
        self._signature: dict[str, object] = {}
        self._done: deque[tuple[float, float]] = deque(maxlen=RATE_LINES)

    def read(self, now: float) -> Iterator[ProgressLine]:
        """New lines that show progress. What is no progress line is skipped."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for text in lines:
            try:
                line = ProgressLine.model_validate_json(text)
            except ValidationError:
                continue
            if self.take(line, now):
                yield line

    def take(self, line: ProgressLine, now: float) -> bool:
        """Take in a line; whether it differs from the one before in more than its time."""
        values = line.model_dump(exclude_unset=True)
        before = self.latest or ProgressLine()
        self.latest = before.model_copy(update=values)
        signature = {k: v for k, v in values.items() if k not in ("time", "rate")}
        if signature == self._signature:
            return False
        self._signature = signature
        if line.done is not None and (not self._done or self._done[-1][1] != line.done):
            if self._done and line.done < self._done[-1][1]:
                self._done.clear()
            if self._done and self._done[-1][0] == now:
                self._done.pop()  # of lines that were read at once only the last happened just now
            self._done.append((now, line.done))
        return True

    def rate(self) -> tuple[float | None, float | None]:
        """Units a second over the last minutes, and the seconds until the total is done."""
        if len(self._done) < 2:
            return None, None
        (start, first), (end, last) = self._done[0], self._done[-1]
        if end <= start:
            return None, None
        rate = (last - first) / (end - start)
        total = self.latest.total if self.latest else None
        return round(rate, 4), round((total - last) / rate, 1) if total and rate else None
