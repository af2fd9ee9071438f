"""Recording a training, and stopping one that goes wrong."""

import json
import logging

import pytest

from aerie.drafter.errors import TrainingFailed
from aerie.drafter.recorder import Recorder


def record(**message):
    found = logging.LogRecord("speculators.metrics", logging.INFO, "", 0, message, (), None)
    found.step = message.get("global_step", 9)
    return found


def train_message(step, loss, dropped=0.0, accuracy=0.5):
    return record(
        train={
            "loss": loss,
            "full_acc_0": accuracy,
            "full_acc_1": 0.4 * accuracy,
            "error_records": dropped,
        },
        profile={"tokens_per_s": 100.0, "queue_ms": 1.0, "step_ms": 100.0},
        epoch=0,
        lr={"Muon": 0.01, "AdamW": 0.01},
        global_step=step,
    )


def test_a_resumed_training_records_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = Recorder(path, 0, lambda _: None)
    for step in range(8):
        first.emit(train_message(step, 1.0))
    path.write_text(path.read_text() + '{"step": 8, "lo')  # cut by a kill
    second = Recorder(path, 5, lambda _: None)
    for step in range(5, 10):
        second.emit(train_message(step, 0.5))
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(10))
    assert lines[6]["loss"] == 0.5
    assert lines[0]["accuracy"] == [0.5, 0.2]
    assert lines[0]["wait_share"] == 0.01


@pytest.mark.parametrize(
    ("loss", "dropped", "message"),
    [
        (float("nan"), 0.0, "the loss is nan"),
        (1.0, 2.0, "dropped samples"),
        (0.0, 0.0, "exactly 0"),
    ],
)
def test_a_training_that_goes_wrong_is_stopped(tmp_path, loss, dropped, message):
    recorder = Recorder(tmp_path / "metrics.jsonl", 0, lambda _: None)
    logger = logging.getLogger("aerie.test")
    logger.addHandler(recorder)
    with pytest.raises(TrainingFailed, match=message):
        logger.handle(train_message(3, loss, dropped))


def test_zero_accuracy_after_the_warm_up_stops_the_training(tmp_path):
    recorder = Recorder(tmp_path / "metrics.jsonl", 0, lambda _: None, warmup_steps=100)
    for step in range(100):
        recorder.emit(train_message(step, 1.0, accuracy=0.0))  # nothing is learned yet
    for step in range(100, 115):
        recorder.emit(train_message(step, 1.0, accuracy=0.0))
    recorder.emit(train_message(115, 1.0, accuracy=0.01))  # one hit starts the count again
    with pytest.raises(TrainingFailed, match="step 135: the accuracy has been exactly 0"):
        for step in range(116, 200):
            recorder.emit(train_message(step, 1.0, accuracy=0.0))
