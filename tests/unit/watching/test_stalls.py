"""The usual gap of a job, its losses, and the diagnosis of one without progress."""

import sys

import pytest

from aerie.watching import gpus
from aerie.watching.diagnosis import Process, diagnose
from aerie.watching.job_status import GpuFigures
from aerie.watching.pace import LossWatch, Pace


def paced(gaps, steady=True):
    pace = Pace(60, 1800, now=0)
    now = 0.0
    pace.event(steady, now)
    for gap in gaps:
        now += gap
        pace.event(steady, now)
    return pace


@pytest.mark.parametrize(
    ("gaps", "usual", "limit"),
    [
        ([1.0] * 50, 1, 60),  # 10 x 1 s is under the floor
        ([20.0] * 5, 20, 200),
        ([1.0] * 100 + [40.0], 1, 60),  # one hiccup
        ([0.1] * 20 + [100.0], 100, 1000),  # answers come in bursts
        ([1.0] * 300 + [15.0] * 100, 15, 150),  # the machine got busy
    ],
)
def test_the_limit_follows_the_usual_gap(gaps, usual, limit):
    pace = paced(gaps)
    assert pace.usual_gap() == pytest.approx(usual)
    assert pace.limit() == pytest.approx(limit)


def test_loading_and_the_first_step_have_a_generous_limit():
    pace = Pace(60, 1800, now=0)
    assert pace.limit() == 1800
    pace.event(False, 300)
    assert pace.limit() == 1800
    pace.event(True, 400)  # working, but its pace is unknown yet
    assert pace.limit() == 1800
    pace.event(True, 402)
    assert pace.limit() == 60
    pace.event(False, 403)  # saving
    assert pace.limit() == 1800
    pace.event(True, 500)
    assert pace.usual_gap() == pytest.approx(2)  # saving does not count as work


def test_the_first_steps_after_a_model_was_loaded_again_have_a_generous_limit():
    pace = paced([1.0] * 10)
    pace.forget()
    pace.event(False, 11)  # the engine died; another one is loaded
    pace.event(True, 300)
    assert pace.limit() == 1800
    pace.event(True, 400)  # a first step with all that is compiled for it
    pace.event(True, 401)
    pace.event(True, 402)
    assert pace.limit() == 1000


def test_no_pace_is_learned_before_a_job_reports_that_it_loads():
    pace = Pace(60, 1800, now=0)
    pace.event(True, 1)
    pace.forget()
    pace.event(False, 2)
    pace.event(True, 100)
    assert pace.limit() == 1800


def test_a_job_that_saves_after_each_piece_of_work_has_a_pace():
    pace = Pace(60, 1800, now=0)
    for start in (1, 10, 19):
        pace.event(True, start)
        pace.event(False, start + 8)
    pace.event(True, 28)
    assert pace.limit() == 80


def test_a_skipped_time_does_not_count():
    pace = paced([1.0] * 10)
    pace.skip(3600)
    assert 3610 - pace.last == pytest.approx(0)


def test_a_jump_of_the_loss_is_reported():
    watch = LossWatch()
    assert [watch.take(2.0 + 0.1 * (i % 5)) for i in range(40)] == [None] * 40
    kind, words = watch.take(9.0)
    assert kind == "spike"
    assert "9" in words
    assert watch.take(2.0) is None


def test_a_growing_loss_is_reported_once():
    watch = LossWatch()
    falling = [4.0 * 0.99**i for i in range(200)]
    assert [found for loss in falling if (found := watch.take(loss))] == []
    growing = [falling[-1] * 1.02**i for i in range(120)]
    assert [found[0] for loss in growing if (found := watch.take(loss))] == ["divergence"]


def gpu(use, power):
    return GpuFigures(index=0, use_percent=use, power_w=power, power_limit_w=700)


@pytest.mark.parametrize(
    ("processes", "figures", "ended", "expected"),
    [
        ([("stopped", 0.0), ("sleeping", 0.0)], [], [], "stopped by a signal"),
        ([("running", 1.0)], [], [], "1.0 cores busy"),
        ([("sleeping", 0.0)], [], [], "wait for something that does not come"),
        ([("disk-sleep", 0.0)], [], [], "waits for a disk"),
        ([("zombie", 0.0), ("sleeping", 0.0)], [], [], "has ended, and the others wait"),
        ([("sleeping", 0.0)], [], ["77 (VLLM::EngineCore)"], "77 (VLLM::EngineCore)"),
        ([("running", 1.0)], [gpu(100, 120)], [], "spins and waits"),
        ([("sleeping", 0.0)], [gpu(0, 80)], [], "the GPUs are idle"),
    ],
)
def test_the_diagnosis_is_in_words(processes, figures, ended, expected):
    found = [Process(i, "python", state, cores, 1.0) for i, (state, cores) in enumerate(processes)]
    assert expected in diagnose(found, figures, None, ended, "working")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("given", ["0,1", ""])
def test_figures_are_missing_only_where_there_is_a_gpu(monkeypatch, tmp_path, there, given):
    (tmp_path / "nvidiactl").touch()
    place = tmp_path / "nvidiactl" if there else tmp_path / "none"
    monkeypatch.setattr(gpus, "NVIDIA", place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    expected = "the package nvidia-ml-py is not installed" if there or given else None
    assert gpus.Gpus().missing == expected


def test_missing_gpu_figures_are_mentioned():
    words = diagnose([Process(1, "python", "sleeping", 0, 1)], [], "no driver", [], "working")
    assert "nothing is known of GPUs (no driver)" in words
