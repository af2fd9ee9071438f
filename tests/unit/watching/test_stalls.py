"""The usual gap of a job, its losses, and what is said of one that does not get on."""

import sys

import pytest

from aerie.watching import diagnosis as stalls
from aerie.watching.diagnosis import LossWatch, Pace, Process, diagnose


def paced(gaps, steady=True):
    pace = Pace(60, 10, 1800, now=0)
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
    pace = Pace(60, 10, 1800, now=0)
    assert pace.limit() == 1800
    pace.event(False, 300)
    assert pace.limit() == 1800
    pace.event(True, 400)  # at work, but how fast is not known yet
    assert pace.limit() == 1800
    pace.event(True, 402)
    assert pace.limit() == 60
    pace.event(False, 403)  # saving
    assert pace.limit() == 1800
    pace.event(True, 500)
    assert pace.usual_gap() == pytest.approx(2)  # the time of saving is none of work


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


def test_a_job_is_at_work_until_it_says_that_it_loads_and_learns_no_pace_from_that():
    pace = Pace(60, 10, 1800, now=0)
    pace.event(True, 1)
    pace.forget()
    pace.event(False, 2)
    pace.event(True, 100)
    assert pace.limit() == 1800


def test_a_job_that_saves_after_all_of_its_work_has_a_pace():
    pace = Pace(60, 10, 1800, now=0)
    for start in (1, 10, 19):
        pace.event(True, start)
        pace.event(False, start + 8)
    pace.event(True, 28)
    assert pace.limit() == 80


def test_a_time_in_which_nothing_could_be_seen_does_not_count():
    pace = paced([1.0] * 10)
    pace.skip(3600)
    assert 3610 - pace.last == pytest.approx(0)


def test_a_jump_of_the_loss_is_told():
    watch = LossWatch(spike=3, divergence=1.5)
    assert [watch.take(2.0 + 0.1 * (i % 5)) for i in range(40)] == [None] * 40
    kind, words = watch.take(9.0)
    assert kind == "spike"
    assert "9" in words
    assert watch.take(2.0) is None


def test_a_growing_loss_is_told_once():
    watch = LossWatch(spike=3, divergence=1.5)
    falling = [4.0 * 0.99**i for i in range(200)]
    assert [found for loss in falling if (found := watch.take(loss))] == []
    growing = [falling[-1] * 1.02**i for i in range(120)]
    assert [found[0] for loss in growing if (found := watch.take(loss))] == ["divergence"]


def gpu(use, power):
    return {"index": 0, "use_percent": use, "power_w": power, "power_limit_w": 700}


@pytest.mark.parametrize(
    ("processes", "gpus", "ended", "expected"),
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
def test_what_is_wrong_is_said_in_words(processes, gpus, ended, expected):
    found = [Process(i, "python", state, cores, 1.0) for i, (state, cores) in enumerate(processes)]
    assert expected in diagnose(found, gpus, None, ended, "working")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("given", ["0,1", ""])
def test_figures_are_missed_only_where_there_is_a_gpu(monkeypatch, tmp_path, there, given):
    (tmp_path / "nvidiactl").touch()
    place = tmp_path / "nvidiactl" if there else tmp_path / "none"
    monkeypatch.setattr(stalls, "NVIDIA", place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    expected = "the package nvidia-ml-py is not installed" if there or given else None
    assert stalls.Gpus().missing == expected


def test_missing_telemetry_is_said():
    words = diagnose([Process(1, "python", "sleeping", 0, 1)], [], "no driver", [], "working")
    assert "nothing is known of GPUs (no driver)" in words
