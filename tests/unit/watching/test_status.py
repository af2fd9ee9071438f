"""The status of made-up run folders: each state, other machines, damaged files."""

import json
import os
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie.watching.page import as_html
from aerie.watching.prometheus import as_prometheus
from aerie.watching.status import gather
from support.run_folder import GONE, ME, RunFolder


def test_a_run_without_any_file_waits_for_its_first_jobs(run):
    found = run.states()
    assert found.pop("import_verifier") == "waiting"
    assert found.pop("collect_prompts") == "waiting"
    assert set(found.values()) == {"not started"}
    assert run.look().state == "waiting"


def test_states_follow_from_files_and_needed_jobs(run):
    run.made("import_verifier", "collect_prompts", "generate_responses", "tokenize_samples")
    run.write("logs/map_vocabulary/32000.log", "counting\n")
    run.status_file("extract_hidden_states", "0", state="stalled", ended=time.time(), exit=75)
    found = run.states()
    assert found["tokenize_samples"] == "done"
    assert found["map_vocabulary 32000"] == "running"
    assert found["extract_hidden_states 0"] == "stalled"
    assert found["train_drafter base"] == found["render_report"] == "out of reach"
    assert run.job("train_drafter base").note == "needs extract_hidden_states 0"


def test_a_job_on_another_host_is_judged_by_its_heartbeat(run):
    run.status_file("extract_hidden_states", "0", age=20, host="node7", pid=GONE)
    assert run.job("extract_hidden_states 0").state == "running"
    run.status_file("extract_hidden_states", "0", age=400, host="node7", pid=os.getpid())
    job = run.job("extract_hidden_states 0")
    assert job.state == "no sign"
    assert job.note.startswith("no sign from node7 since ")


def test_wrong_clocks_of_other_hosts_do_not_matter(run):
    """The job's clock is ahead by an hour, and the file's time is right."""
    ahead = {"host": "node7", "updated": time.time() + 3600, "started": time.time() + 3000}
    run.status_file("extract_hidden_states", "0", age=400, **ahead)
    assert run.job("extract_hidden_states 0").state == "no sign"
    run.status_file("extract_hidden_states", "0", age=10, **ahead)
    job = run.job("extract_hidden_states 0")
    assert (job.state, round(job.seconds)) == ("running", 600)
    # It is an hour behind: what ended in this run did not end in an earlier one.
    behind = {"host": "node7", "started": time.time() - 3700, "ended": time.time() - 3600}
    run.status_file("extract_hidden_states", "0", age=10, state="failed", exit=1, **behind)
    assert run.job("extract_hidden_states 0").state == "failed"
    # Both are ahead, as is a file server whose clock is.
    run.status_file("extract_hidden_states", "0", age=-100, host="node7")
    assert run.job("extract_hidden_states 0").state == "running"


def test_a_job_on_this_host_is_dead_when_its_process_is_gone(run):
    run.status_file("train_drafter", "base", age=20, pid=GONE)
    assert run.job("train_drafter base").state == "dead"
    # Its number was given to another process since.
    run.status_file("train_drafter", "base", age=20, started=ME - 5000)
    job = run.job("train_drafter base")
    assert job.state == "dead"
    assert f"process {os.getpid()} is gone" in job.note
    run.status_file("train_drafter", "base", age=20)
    assert run.job("train_drafter base").state == "running"
    run.status_file("train_drafter", "base", age=400)
    assert run.job("train_drafter base").state == "no sign"


def test_a_failure_without_supervisor_comes_from_snakemakes_log(run):
    log = "results/demo/logs/tokenize_samples/run.log"
    run.write(
        "logs/tokenize_samples/run.log",
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in <module>\nOSError: [Errno 28] No space left on device\n',
    )
    assert run.job("tokenize_samples").state == "running"
    began = f"[Mon]\nlocalrule tokenize_samples:\n    log: {log}\n    jobid: 1\n"
    failed = (
        f"Error in rule tokenize_samples:\n    log: {log} (check log file(s) for error details)\n"
    )
    run.write("../../.snakemake/log/1.snakemake.log", began + failed)
    job = run.job("tokenize_samples")
    assert job.state == "failed"
    assert "No space left on device" in job.reason
    assert "room" in job.reason or "space" in job.reason.split("\n", 1)[1]  # the catalogue's advice
    # Another run of the same folder leaves a log of its own, and has not mended it.
    other = began.replace("results/demo", "results/other")
    run.write("../../.snakemake/log/0.snakemake.log", other + failed, age=2000)
    run.write("../../.snakemake/log/2.snakemake.log", other, age=-1)
    assert run.job("tokenize_samples").state == "failed"
    run.write("../../.snakemake/log/1.snakemake.log", began + failed + began)
    assert run.job("tokenize_samples").state == "running"


def test_an_error_message_at_the_end_of_a_log_is_a_failure(run):
    run.write("logs/import_verifier/run.log", "error: no/such/model: not found\n")
    assert run.job("import_verifier").state == "failed"


def test_a_failure_of_an_earlier_run_is_only_a_note(run):
    run.status_file("train_drafter", "base", age=1500, state="failed", ended=time.time() - 1500)
    job = run.job("train_drafter base")
    assert job.state == "not started"
    assert job.note == "failed in an earlier run"


def test_results_from_before_are_marked_as_earlier(run):
    run.made(
        "import_verifier", "collect_prompts", "generate_responses", "tokenize_samples", age=500
    )
    assert not run.job("tokenize_samples").earlier
    (run.folder / "responses/manifest.json").unlink()
    run.status_file("generate_responses")
    job = run.job("tokenize_samples")
    assert job.state == "done" and job.earlier
    assert run.job("map_vocabulary 32000").state == "not started"
    assert "done earlier" in run.page()


def test_jobs_come_from_the_list_that_the_workflow_wrote(tmp_path):
    drafters = {"small": 1000, "full": None}
    run = RunFolder(tmp_path / "results/wide", drafters=drafters, lanes=12, answers=False)
    for lane in range(5):
        run.status_file("extract_hidden_states", str(lane), host=f"node{lane}")
    names = [j.name for j in run.look().jobs]
    assert names.count("extract_hidden_states 11") == 1
    assert "generate_responses" not in names
    assert "map_vocabulary 1000" in names and "train_drafter full" in names
    page = run.page()
    assert "7 not started, 5 running" in page
    assert "on node4" in page


@pytest.mark.parametrize("content", [None, '{"jobs": [{"stage": 1}]}', "[", "{}"])
def test_a_run_without_a_list_of_jobs_names_the_remedy(run, content):
    path = run.folder / "jobs.json"
    run.status_file("train_drafter", "base")
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    found = run.look()
    assert (found.state, found.jobs) == ("not started", [])
    assert "jobs.json" in found.note
    assert "Run `make run` once more; it writes the list of jobs" in found.note
    assert [str(path) in line for line in found.unreadable] == [True] * (content is not None)
    page = " ".join(run.page().split())
    assert "demo · not started" in page
    assert "it writes the list of jobs" in page


@pytest.mark.parametrize("there", [True, False])
def test_a_run_that_was_never_started_says_so(tmp_path, there):
    folder = tmp_path / "results/new"
    if there:
        folder.mkdir(parents=True)
    found = gather(folder)
    assert (found.state, found.jobs, found.unreadable) == ("not started", [], [])
    assert found.note == "no job of this run has been started; `make run` starts them"


def test_a_complete_run_is_done_whatever_its_list_of_jobs_is_older_than(run):
    run.made(*(job.stage for job in run.jobs.jobs))
    assert run.look().state == "done"
    assert f"report {run.folder}/report.html" in run.page(300)
    # It was started again with another configuration, which adds a drafter.
    more = RunFolder(run.folder.parent / "more", drafters={"base": 32000, "full": None})
    (more.folder / "jobs.json").replace(run.folder / "jobs.json")
    states = run.states()
    assert states["train_drafter base"] == "done"
    assert states["train_drafter full"] == "waiting"
    assert run.job("render_report").earlier


DAMAGED = [
    '{"state": "runn',
    "[1, 2]",
    '{"state": 7, "done": "x", "gpus": 3, "warnings": [1], "alerts": "a", "pid": "p"}',
    '{"state": "running", "started": "yesterday", "updated": null, "pid": null, "host": 3}',
    '{"state": "running", "done": NaN, "total": 1e999, "gpus": [1, {"index": {}, "power_w": NaN}]}',
    '{"state": "failed", "ended": 1e300, "pid": 1e999, "time": 1, "accuracy": ["y"]}\n',
    f'{{"state": "running", "done": {"9" * 400}, "time": {"9" * 400}, "started": -1e18}}\n',
    '{"state": "done", "reason": {"a": 1}, "exit": "\\u001b[2J"}',
    "\x00\xff",
    "",
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_hides_nothing_else(run, content):
    run.made("import_verifier", "collect_prompts", "tokenize_samples")
    for name in (
        "logs/train_drafter/base.status.json",
        "logs/train_drafter/base.progress.jsonl",
        "logs/collect_prompts/run.progress.jsonl",
        "samples/report.json",
        "benchmarks/tokenize_samples/run.tsv",
        "drafters/base/metrics.jsonl",
        "config.json",
    ):
        run.write(name, content)
    (run.folder / "drafters/base/model").mkdir()
    run.write("hidden_states/lane-0.json", content)
    found = run.look()
    assert {j.name: j.state for j in found.jobs}["import_verifier"] == "done"
    assert any("samples/report.json" in line for line in found.unreadable)
    page = run.page()
    assert "30 layers of 576" in page
    assert "cannot be read" in page
    assert "\x1b[2J" not in page
    as_html(found, 3)
    json.dumps(found.as_json(), allow_nan=False)
    list(text_string_to_metric_families(as_prometheus(found)))
