"""`metrics.jsonl`: what a training step and a validation measured."""

import json
from pathlib import Path
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from aerie.common.errors import InputError
from aerie.common.records import Record


class MetricsLine(Record):
    """A line of `metrics.jsonl`: a training step or a validation. Absent keys are not written."""

    step: int
    """Training steps before it."""
    epoch: int
    """Number of the epoch, from 0."""
    loss: float
    """Sum over the TTT steps k = 0, 1, … of `ttt_step_loss_decay`^k times the KL divergence (nats)
    of the drafter's distribution from the verifier's within the draft vocabulary, mean over the
    supervised tokens (speculators' `compute_metrics`). Of a validation: mean over its sequences."""
    accuracy: list[float]
    """By TTT step: share of supervised tokens of which this and all earlier steps are right."""
    conditional_accuracy: list[float]
    """By TTT step: share of those right in all earlier steps that are right in this one too."""
    validation: bool = False
    """True for a validation; it has none of the keys below."""
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    wait_share: float | None = None
    """Share of the step spent waiting for data."""

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in serialize(self).items() if v is not None and v is not False}


def read_metrics(path: Path) -> list[MetricsLine]:
    """Lines of a `metrics.jsonl`; `InputError` names a damaged one."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: not readable ({error})") from error
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(MetricsLine.model_validate(json.loads(text)))
        except ValueError as error:
            raise InputError(
                f"{path}: line {number} is not a line of metrics ({error}); delete the file and "
                "run again"
            ) from error
    return lines
