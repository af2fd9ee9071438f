"""Recording a training: speculators' log records become `metrics.jsonl`, and bad ones stop it."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aerie.drafter.errors import TrainingFailed
from aerie.drafter.metrics import MetricsLine

ZERO_STEPS = 20
"""Steps in a row with an accuracy of exactly 0, after the warm-up, that end a training. A single
small batch can miss every token by chance."""


class Recorder(logging.Handler):
    """Writes speculators' metric records as lines of `metrics.jsonl` and checks them.

    Of an existing file the lines before `resume_step` are kept. `on_step` gets each line.
    Raises `TrainingFailed` on what no healthy training shows.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int,
        on_step: Callable[[MetricsLine], None],
        warmup_steps: int = 0,
    ):
        super().__init__()
        self.warmup_steps = warmup_steps
        self._zeros = 0
        kept = []
        if path.is_file():
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    line = MetricsLine.model_validate(json.loads(text))
                except ValueError:
                    break
                if line.step < resume_step or (line.validation and line.step <= resume_step):
                    kept.append(text)
        path.write_text("".join(text + "\n" for text in kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")
        self.on_step = on_step

    def emit(self, record: logging.LogRecord) -> None:
        message = record.msg
        if not isinstance(message, dict) or not ({"train", "val"} & set(message)):
            return
        validation = "val" in message
        found = message["val" if validation else "train"]
        values = {k.removesuffix("_epoch"): v for k, v in found.items()}
        line = MetricsLine(
            step=message["global_step"] if "global_step" in message else record.__dict__["step"],
            epoch=message["epoch"],
            loss=values["loss"],
            accuracy=_by_step(values, "full_acc_"),
            conditional_accuracy=_by_step(values, "cond_acc_"),
            validation=validation,
            **({} if validation else _speed(message)),
        )
        self.file.write(json.dumps(line.as_json()) + "\n")
        self.file.flush()
        self._check(line, bool(values.get("error_records")))
        self.on_step(line)

    def _check(self, line: MetricsLine, dropped: bool) -> None:
        place = f"{'validation after ' if line.validation else ''}step {line.step}"
        if not math.isfinite(line.loss):
            raise TrainingFailed(f"{place}: the loss is {line.loss}")
        if dropped:
            raise TrainingFailed(f"{place}: the trainer dropped samples")
        if line.loss == 0:
            raise TrainingFailed(
                f"{place}: the loss is exactly 0, so nothing is supervised; look at a few samples "
                "with `make inspect`"
            )
        if line.validation or line.step < self.warmup_steps:
            return
        self._zeros = 0 if any(line.accuracy) else self._zeros + 1
        if self._zeros >= ZERO_STEPS:
            raise TrainingFailed(
                f"{place}: the accuracy has been exactly 0 for {ZERO_STEPS} steps after the "
                "warm-up; the states do not belong to the tokens they are compared with"
            )

    def handleError(self, record: logging.LogRecord) -> None:
        raise


def _speed(message: dict[str, Any]) -> dict[str, float]:
    """The keys of a training step that a validation lacks."""
    profile = message.get("profile") or {}
    rates = message["lr"]
    return {
        "learning_rate": max(rates.values()) if isinstance(rates, dict) else rates,
        "tokens_per_second": round(profile.get("tokens_per_s", 0.0), 1),
        "wait_share": round(profile.get("queue_ms", 0) / profile["step_ms"], 5),
    }


def _by_step(values: dict[str, float], prefix: str) -> list[float]:
    count = sum(k.startswith(prefix) for k in values)
    return [values[f"{prefix}{k}"] for k in range(count)]
