"""Metrics lines as they stand in the file."""

import json

import pytest

from aerie.common.errors import InputError
from aerie.drafter.metrics import MetricsLine, read_metrics

STEP = {
    "step": 3,
    "epoch": 0,
    "loss": 1.5,
    "accuracy": [0.5, 0.2],
    "conditional_accuracy": [0.5, 0.4],
    "learning_rate": 0.0,
    "tokens_per_second": 100.0,
    "wait_share": 0.01,
}
VALIDATION = {**{k: STEP[k] for k in list(STEP)[:5]}, "validation": True}


@pytest.mark.parametrize("line", [STEP, VALIDATION])
def test_absent_keys_are_not_written(line):
    written = MetricsLine(**line).as_json()
    assert json.dumps(written) == json.dumps(line)


@pytest.mark.parametrize("text", ['{"step": 0, "loss"', "7", '{"step": 0, "epoch": 0}'])
def test_a_damaged_line_is_named(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(STEP) + "\n" + text)
    with pytest.raises(InputError, match="line 2 is not a line of metrics"):
        read_metrics(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"metrics.jsonl: no such file"):
        read_metrics(tmp_path / "metrics.jsonl")
