"""The lines that a job writes of its progress."""

import json

import pytest

from aerie.common import progress
from aerie.common.progress import JobProgress
from support.processes import Clock


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_progress_lines_show_phases_and_rate(tmp_path, clock):
    log = tmp_path / "progress.jsonl"
    with JobProgress("train_drafter", 0, "steps", log, phase="loading") as bar:
        clock.sleep(0.3)
        bar.begin(500, 1000)  # continued from a checkpoint
        bar.enter("working")
        clock.sleep(0.1)
        bar.update(600, loss=1.5)
        bar.enter("saving")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["loading", "working", "saving", "finishing"]
    assert lines[2]["done"] == 600
    assert lines[2]["loss"] == 1.5
    assert lines[2]["rate"] == pytest.approx(1000)  # 100 steps in 0.1 s; loading does not count


def test_progress_within_a_unit_is_written(tmp_path, clock):
    log = tmp_path / "progress.jsonl"
    with JobProgress("generate_responses", 10, "records", log) as bar:
        for _ in range(12):
            clock.sleep(0.1)
            bar.beat(8)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 3  # at most one a second, and the phases
    assert lines[-1]["beats"] == 96
