"""How often a job shows progress, and whether its loss behaves."""

import math
import statistics
from collections import deque

GAPS = 200  # gaps that the usual one is computed from
STALL_GAPS = 10.0
"""A job has stalled after this many times its usual gap without progress."""
LOSSES = 50  # losses of a mean or median
LOSS_SPIKE = 3.0
"""A loss this many times the median of the losses before it is a spike."""
LOSS_DIVERGENCE = 1.5
"""A mean loss this many times the lowest mean so far is a divergence."""


class Pace:
    """Learns how often a job shows progress. All times in seconds of one clock.

    `usual_gap` is the weighted median: the gap in the middle when the last ones are laid end to end
    by length. A single long gap hardly counts, but for a job that returns a hundred answers at once
    and then none for minutes, the minutes are usual.
    """

    def __init__(self, stall_seconds: float, load_seconds: float, now: float):
        self.stall_seconds, self.load_seconds = stall_seconds, load_seconds
        self.last = now
        self.steady = False
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def event(self, steady: bool, now: float) -> None:
        """Progress was seen; `steady`: the job is working, not loading, validating or saving."""
        if self.steady:
            self._gaps.append(now - self.last)
        self.last, self.steady = now, steady

    def forget(self) -> None:
        """A model is being loaded, perhaps again: the first steps after it have no pace yet."""
        self._gaps.clear()
        self.steady = False

    def skip(self, seconds: float) -> None:
        """Ignore a time in which nothing could be seen, such as a suspended machine."""
        self.last += seconds

    def usual_gap(self) -> float | None:
        if not self._gaps:
            return None
        gaps = sorted(self._gaps)
        half, reached = sum(gaps) / 2, 0.0
        for gap in gaps:
            reached += gap
            if reached >= half:
                return gap
        return gaps[-1]

    def limit(self) -> float:
        """After how many seconds without progress the job has stalled."""
        usual = self.usual_gap()
        if not self.steady or usual is None:
            return self.load_seconds
        return max(self.stall_seconds, STALL_GAPS * usual)


class LossWatch:
    """Notices a loss that jumps (`LOSS_SPIKE`) or grows (`LOSS_DIVERGENCE`, over `LOSSES`
    losses)."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=LOSSES)
        self._lowest = math.inf
        self._diverged = False

    def take(self, loss: float) -> tuple[str, str] | None:
        """`spike` or `divergence`, with a message; None when the loss is normal."""
        found = None
        if len(self._recent) >= LOSSES // 2:
            median = statistics.median(self._recent)
            if loss > LOSS_SPIKE * median:
                found = "spike", f"the loss jumped to {loss:.4g}; the median before is {median:.4g}"
        self._recent.append(loss)
        if len(self._recent) < LOSSES:
            return found
        mean = statistics.fmean(self._recent)
        self._lowest = min(self._lowest, mean)
        grown = mean > LOSS_DIVERGENCE * self._lowest
        if grown and not self._diverged:
            words = (
                f"the loss grows: a mean of {mean:.4g} over {LOSSES} steps, after "
                f"{self._lowest:.4g}; try a lower learning rate or a longer warm-up"
            )
            found = "divergence", words
        self._diverged = grown
        return found
