"""A drafter of a run: its metrics and measurements, and what follows from them.

The summary in the terminal must start at once, so nothing heavy is imported here.
"""

from dataclasses import dataclass
from pathlib import Path

from aerie.config import Drafter
from aerie.drafter.metrics import MetricsLine, read_metrics
from aerie.evaluation.results import Acceptance, Speed


@dataclass(frozen=True)
class Expectation:
    """Validation's cumulative accuracy beside what was served.

    Compared on the first `positions` drafted tokens: as many as both drafted. `expected` =
    1 + Σ accuracy and `served` = 1 + Σ acceptance over these positions, tokens a verifier step.
    """

    positions: int
    accuracy: list[float]
    expected: float
    served: float

    @property
    def gap(self) -> float:
        return self.expected - self.served


@dataclass(frozen=True)
class SpeedComparison:
    """Speed at one `concurrency` on `prompts` prompts.

    `without`, `with_drafter`: tokens a second; `seconds_without`, `seconds_with`: time per output
    token; `ratio` of the two speeds. `step_cost`: how much longer a step takes with the drafter,
    and so the acceptance length from which it pays. It uses the acceptance length on all held-out
    prompts; the timed ones are some of them.
    """

    concurrency: int
    prompts: int
    without: float
    with_drafter: float
    seconds_without: float
    seconds_with: float
    ratio: float
    step_cost: float


@dataclass
class TrainedDrafter:
    """One drafter: its settings, the lines of its metrics, and its measurements.

    `settings` is None for the summary, which needs none.
    """

    name: str
    settings: Drafter | None
    metrics: list[MetricsLine]
    acceptance: Acceptance
    speed: Speed
    model: Path

    @property
    def vocabulary(self) -> int | str | None:
        return self.settings.vocabulary if self.settings else None

    @property
    def training(self) -> list[MetricsLine]:
        return [x for x in self.metrics if not x.validation]

    @property
    def validation(self) -> list[MetricsLine]:
        return [x for x in self.metrics if x.validation]

    @property
    def tokens_drafted(self) -> int:
        """Tokens drafted a step when it was measured (K)."""
        return len(self.acceptance.acceptance_per_position)

    @property
    def expectation(self) -> Expectation | None:
        """None when no validation was recorded."""
        if not self.validation:
            return None
        accuracy = self.validation[-1].accuracy
        served = self.acceptance.acceptance_per_position
        n = min(len(accuracy), len(served))
        return Expectation(n, accuracy, 1 + sum(accuracy[:n]), 1 + sum(served[:n]))

    @property
    def speeds(self) -> list[SpeedComparison]:
        """By concurrency, in the order of the measurement."""
        ratios = {r.concurrency: r.ratio for r in self.speed.speedup}
        return [
            SpeedComparison(
                concurrency=a.concurrency,
                prompts=a.prompts,
                without=a.tokens_per_second,
                with_drafter=b.tokens_per_second,
                seconds_without=a.time_per_output_token_s,
                seconds_with=b.time_per_output_token_s,
                ratio=ratios[a.concurrency],
                step_cost=self.acceptance.acceptance_length / ratios[a.concurrency],
            )
            for a, b in zip(self.speed.without, self.speed.with_, strict=True)
        ]


def read_drafter(run: Path, name: str, settings: Drafter | None = None) -> TrainedDrafter:
    """A drafter of the run in this folder; `InputError` when it was not trained or measured."""
    evaluation, folder = run / "evaluation" / name, run / "drafters" / name
    return TrainedDrafter(
        name,
        settings,
        read_metrics(folder / "metrics.jsonl"),
        Acceptance.read(evaluation / "acceptance.json"),
        Speed.read(evaluation / "speed.json"),
        folder / "model",
    )


def speed_words(ratio: float) -> str:
    if ratio >= 1.005:
        return f"{ratio:.2f} times as fast as without it"
    if ratio > 0.995:
        return "as fast as without it"
    return f"at {ratio:.2f} of its speed without it"
