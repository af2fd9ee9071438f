"""The status page in terminals of any width."""

import json
import os
import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie.drafter.metrics import MetricsLine
from aerie.watching.page import sparkline
from aerie.watching.prometheus import as_prometheus
from support.records import acceptance, prompt_set, speed
from support.run_folder import ME


def test_a_running_job_is_shown_with_everything_known(run):
    run.status_file(
        "train_drafter",
        "base",
        gpus=[
            {
                "index": 1,
                "name": "NVIDIA H200",
                "use_percent": 98,
                "memory_gib": 100.0,
                "memory_total_gib": 139.0,
                "power_w": None,
            }
        ],
        alerts=["the loss jumped to 9"],
    )
    lines = [
        {
            "time": time.time() + i,
            "done": i,
            "total": 120,
            "loss": 9.0 - i,
            "accuracy": [0.5, i / 20],
        }
        for i in range(8)
    ]
    old = {"time": ME - 1000, "done": 100, "total": 120, "loss": 77.0, "accuracy": [0.0, 0.0]}
    run.write(
        "logs/train_drafter/base.progress.jsonl",
        "".join(json.dumps(x) + "\n" for x in [old, *lines]) + '{"time": 17',
    )
    page = run.page()
    for words in (
        "30/120 steps, 1 min 00 s left, 1.5/s",
        f"on {os.uname().nodename}, process {os.getpid()}",
        "1.9 cores busy, 3.2 GiB, disk 68.7 GiB free",
        "GPU 1 NVIDIA H200: 98 % use, 100 of 139 GiB, W unknown",
        "loss 2.000  █▇▆▅▄▃▂▁",
        "tokens a step expected 1.85",
        "! the loss jumped to 9",
        "degraded 2",
        "loss spike 1",
    ):
        assert words in page
    # The old attempt's loss is not among them.
    assert run.job("train_drafter base").losses == [9.0 - i for i in range(8)]
    assert "cannot be read" not in page  # an unfinished line is no error


def test_messages_in_the_logs_come_with_the_command_that_explains_them(run):
    """The log with most of the gravest class is the one to look at first."""
    run.status_file("collect_prompts", warnings={"hint": 50})
    assert f"scripts/triage_log.py {run.folder}/logs/collect_prompts/run.log\n" in run.page(300)
    run.status_file("train_drafter", "base", warnings={"degraded": 1, "hint": 2})
    run.status_file("generate_responses", warnings={"hint": 0})
    page = run.page(300)
    assert "what they mean (1 of 2 logs):\n" in page
    assert f"scripts/triage_log.py {run.folder}/logs/train_drafter/base.log\n" in page
    for stage, part in (("collect_prompts", "run"), ("train_drafter", "base")):
        run.status_file(stage, part, warnings={"hint": 0})
    assert "messages in the logs" not in run.page(300)


@pytest.mark.parametrize(("done", "total"), [(361, 1024), (10_361, 99_999)])
def test_a_line_of_80_columns_shows_the_remaining_time(run, done, total):
    values = {"unit": "records", "rate": 6.7, "remaining_seconds": 90.0}
    run.status_file("generate_responses", done=done, total=total, **values)
    line = next(x for x in run.page(80, short=True).splitlines() if "▶ generate" in x)
    assert f"{done:,}/{total:,} records, 1 min" in line


def test_a_failure_shows_its_reason_and_its_log(run):
    reason = "exit status 1: torch.OutOfMemoryError: CUDA out of memory\nuse less memory"
    log = run.write("logs/train_drafter/base.log", "…")
    run.status_file(
        "train_drafter", "base", state="failed", reason=reason, exit=1, ended=time.time()
    )
    page = run.page()
    assert "what went wrong" in page
    assert "exit status 1" in page
    assert "use less memory" in page
    assert str(log) in page.replace("\n", "").replace(" ", "")


def test_the_page_of_a_finished_run_shows_its_results(run):
    run.made("import_verifier")
    for part in ("acceptance", "speed"):
        run.write(f"benchmarks/measure_{part}/base.tsv", "s\th:m:s\n75.5\t0:01:15\n")
    sets = {"heldout": prompt_set([0.41, 0.17]), "code": prompt_set([0.5, 0.4])}
    sets["heldout"].acceptance_length = 1.66
    run.write("evaluation/base/acceptance.json", acceptance(sets).as_json())
    run.write("evaluation/base/speed.json", speed({1: (1.0, 1.19)}).as_json())
    lines = [
        MetricsLine(step=0, epoch=0, loss=9.0, accuracy=[0.1], conditional_accuracy=[0.1]),
        MetricsLine(
            step=1,
            epoch=0,
            loss=4.5,
            accuracy=[0.3, 0.2],
            conditional_accuracy=[0.3, 0.7],
            validation=True,
        ),
    ]
    metrics = [line.as_json() for line in lines]
    (run.folder / "drafters/base/model").mkdir(parents=True)
    run.write("drafters/base/metrics.jsonl", "".join(json.dumps(m) + "\n" for m in metrics))
    page = run.page(width=160)
    assert "heldout 1.66, code 1.90; by position 0.410 0.170" in page
    assert "in 1 min 16 s" in page
    assert "1.19 times at concurrency 1" in page
    assert "1 steps, validation loss 4.500 (sum of 2 TTT steps), 1.50 tokens a step" in page
    families = {
        (s.name, s.labels.get("prompt_set")): s.value
        for f in text_string_to_metric_families(as_prometheus(run.look()))
        for s in f.samples
    }
    assert families["aerie_acceptance_length_tokens", "code"] == 1.9
    assert families["aerie_speedup_ratio", None] == 1.19


@pytest.mark.parametrize(("width", "short"), [(40, False), (40, True), (80, True)])
def test_a_narrow_terminal_shows_the_same_words_in_few_lines(run, width, short):
    run.made("import_verifier")
    run.status_file("train_drafter", "base")
    run.status_file("generate_responses", state="failed", reason="for a reason " * 20)
    page = run.page(width, short)
    assert all(len(line) <= width for line in page.splitlines())
    above = page.split("what went wrong ─")[0]
    assert len(above.splitlines()) < (15 if short else 40)
    words = " ".join(above.replace("━", " ").replace("╸", " ").split())
    assert "✓ import_verifier done" in words
    assert "▶ train_drafter base running" in words
    assert "✗ generate_responses failed; for a" in words
    assert short or "30/120 steps, 1 min 00 s left, 1.5/s" in words


def test_a_sparkline_shows_the_course_of_its_values():
    assert sparkline([1.0, 2.0, 3.0]) == "▁▄█" or sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    many = sparkline([float(i) for i in range(1000)])
    assert len(many) == 24 and many == "".join(sorted(many))
    assert not re.search(r"\s", many)
