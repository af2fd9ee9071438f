"""What is said of a run from made-up folders: each state, other machines, damaged files."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import show_status
from aerie.config import load_config
from aerie.watching.page import as_html, as_prometheus, draw, sparkline
from aerie.watching.status import gather
from support.paths import SCRIPTS

GONE = 2**22 + 1  # above the highest number that a process of Linux can have


class MadeUp:
    """A run's folder, filled as rules and supervisor fill it."""

    def __init__(self, folder, **config):
        self.folder = folder
        folder.mkdir(parents=True)
        self.config = load_config({"run": folder.name, **config}).model_dump()
        self.write("config.json", self.config, age=1000)  # when the run was started

    def write(self, name, value="", age=0.0):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        os.utime(path, (time.time() - age,) * 2)
        return path

    def made(self, *stages, age=0.0):
        outputs = {
            "import_verifier": ["verifier/fingerprint.json"],
            "collect_prompts": [
                "prompts/train.jsonl.zst",
                "prompts/heldout.jsonl.zst",
                "prompts/report.json",
            ],
            "generate_responses": ["responses/manifest.json"],
            "tokenize_samples": [
                "samples/samples.parquet",
                "samples/shards.json",
                "samples/report.json",
            ],
        }
        for stage in stages:
            for name in outputs[stage]:
                self.write(name, VERIFIER if name.startswith("verifier") else "{}", age)

    def status_file(self, stage, part="run", age=0.0, **values):
        now = time.time() - age
        found = {
            "stage": stage,
            "state": "running",
            "phase": "working",
            "done": 30,
            "total": 120,
            "unit": "steps",
            "rate": 1.5,
            "remaining_seconds": 60.0,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "started": ME,
            "updated": now,
            "last_progress": now - 2,
            "stall_after_seconds": 60.0,
            "gpus": [],
            "gpus_missing": "NVML: Driver Not Loaded",
            "warnings": {"degraded": 2, "loss spike": 1},
            "cores_busy": 1.9,
            "memory_gib": 3.2,
            "disk_free_gib": 68.7,
            **values,
        }
        self.write(f"logs/{stage}/{part}.status.json", found, age)

    def look(self):
        return gather(self.folder)

    def job(self, name):
        return next(j for j in self.look().jobs if j.name == name)

    def page(self, width=100):
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(draw(self.look()))
        return console.file.getvalue()

    def show(self, *arguments):
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "show_status.py"), str(self.folder), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


VERIFIER = json.dumps({"path": "verifiers/SmolLM2", "num_layers": 30, "hidden_size": 576})


def born() -> float:
    import psutil

    return psutil.Process().create_time()


ME = born()


@pytest.fixture
def run(tmp_path):
    return MadeUp(tmp_path / "results" / "demo")


def states(run):
    return {j.name: j.state for j in run.look().jobs}


def test_a_run_that_has_not_begun(run):
    found = states(run)
    assert found.pop("import_verifier") == "waiting"
    assert found.pop("collect_prompts") == "waiting"
    assert set(found.values()) == {"not started"}
    assert run.look().state == "waiting"


def test_what_runs_what_waits_and_what_cannot_be_reached(run):
    run.made("import_verifier", "collect_prompts", "generate_responses", "tokenize_samples")
    run.write("logs/map_vocabulary/32000.log", "counting\n")
    run.status_file("extract_hidden_states", "0", state="stalled", ended=time.time(), exit=75)
    found = states(run)
    assert found["tokenize_samples"] == "done"
    assert found["map_vocabulary 32000"] == "running"
    assert found["extract_hidden_states 0"] == "stalled"
    assert found["train_drafter base"] == found["render_report"] == "out of reach"
    assert run.job("train_drafter base").note == "needs extract_hidden_states 0"


def test_a_running_job_is_shown_with_all_that_is_known(run):
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
    # The old attempt's is none of them (in the page a process id may have any digits).
    assert run.job("train_drafter base").losses == [9.0 - i for i in range(8)]
    assert "cannot be read" not in page  # a line that is being written is nothing to report


def test_messages_in_the_logs_come_with_the_way_to_look_at_them(run):
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
def test_a_line_of_80_columns_still_shows_the_remaining_time(run, done, total):
    values = {"unit": "records", "rate": 6.7, "remaining_seconds": 90.0}
    run.status_file("generate_responses", done=done, total=total, **values)
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(draw(run.look(), short=True))
    line = next(x for x in console.file.getvalue().splitlines() if "▶ generate" in x)
    assert f"{done:,}/{total:,} records, 1 min" in line


def test_a_job_of_another_host_is_judged_by_its_heartbeat(run):
    run.status_file("extract_hidden_states", "0", age=20, host="node7", pid=GONE)
    assert run.job("extract_hidden_states 0").state == "running"
    run.status_file("extract_hidden_states", "0", age=400, host="node7", pid=os.getpid())
    job = run.job("extract_hidden_states 0")
    assert job.state == "no sign"
    assert job.note.startswith("no sign from node7 since ")


def test_clocks_of_other_hosts_may_be_off(run):
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


def test_a_job_of_this_host_is_dead_when_its_process_is_gone(run):
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


def test_a_failure_shows_its_reason_and_the_log_to_read(run):
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


def test_a_failure_without_supervisor_is_known_from_snakemakes_log(run):
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


def test_a_failure_of_an_earlier_run_is_told_as_such(run):
    run.status_file("train_drafter", "base", age=1500, state="failed", ended=time.time() - 1500)
    job = run.job("train_drafter base")
    assert job.state == "not started"
    assert job.note == "failed in an earlier run"


def test_results_of_before_are_told_from_those_of_now(run):
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


def test_lanes_and_drafters_come_from_the_runs_own_configuration(tmp_path):
    drafters = {"small": {"vocabulary": 1000}, "full": {"vocabulary": "full"}}
    run = MadeUp(
        tmp_path / "results/wide",
        drafters=drafters,
        hidden_states={"lanes": 12},
        generation={"mode": "keep"},
    )
    for lane in range(5):
        run.status_file("extract_hidden_states", str(lane), host=f"node{lane}")
    names = [j.name for j in run.look().jobs]
    assert names.count("extract_hidden_states 11") == 1
    assert "generate_responses" not in names
    assert "map_vocabulary 1000" in names and "train_drafter full" in names
    page = run.page()
    assert "7 not started, 5 running" in page
    assert "on node4" in page
    # Without it, from what lies there.
    (run.folder / "config.json").unlink()
    run.write("drafters/full/metrics.jsonl")
    found = run.look()
    names = [j.name for j in found.jobs]
    assert "extract_hidden_states 4" in names and "train_drafter full" in names
    assert found.known_from == "the files in its folder"


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


def test_the_page_of_a_finished_run_tells_what_came_out(run):
    run.made("import_verifier")
    for part in ("acceptance", "speed"):
        run.write(f"benchmarks/measure_{part}/base.tsv", "s\th:m:s\n75.5\t0:01:15\n")
    heldout = {"acceptance_length": 1.66, "acceptance_per_position": [0.41, 0.17]}
    run.write(
        "evaluation/base/acceptance.json",
        {**heldout, "prompt_sets": {"heldout": heldout, "code": {"acceptance_length": 1.9}}},
    )
    run.write("evaluation/base/speed.json", {"speedup": [{"concurrency": 1, "ratio": 1.19}]})
    metrics = [
        {"step": 0, "loss": 9.0, "accuracy": [0.1]},
        {"step": 1, "loss": 4.5, "accuracy": [0.3, 0.2], "validation": True},
    ]
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
def test_a_narrow_terminal_has_the_same_words_in_few_lines(run, width, short):
    run.made("import_verifier")
    run.status_file("train_drafter", "base")
    run.status_file("generate_responses", state="failed", reason="for a reason " * 20)
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(draw(run.look(), short))
    page = console.file.getvalue()
    assert all(len(line) <= width for line in page.splitlines())
    above = page.split("what went wrong ─")[0]
    assert len(above.splitlines()) < (15 if short else 40)
    words = " ".join(above.replace("━", " ").replace("╸", " ").split())
    assert "✓ import_verifier done" in words
    assert "▶ train_drafter base running" in words
    assert "✗ generate_responses failed; for a" in words
    assert short or "30/120 steps, 1 min 00 s left, 1.5/s" in words


def test_the_page_ends_quietly_with_its_reader_and_fits_any_encoding(run):
    run.made("import_verifier")
    command = [sys.executable, str(SCRIPTS / "show_status.py"), str(run.folder)]
    for option in ((), ("--json",)):
        process = subprocess.Popen(
            [*command, *option], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == ""
        process.wait()
    done = subprocess.run(
        command,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert b"import_verifier" in done.stdout
    assert b"\x1b" not in done.stdout


def test_no_figure_is_there_twice_whatever_the_files_say(run):
    gpu = {"index": 0, "use_percent": 5}
    run.status_file("train_drafter", "base", gpus=[gpu, gpu, {}, {"use_percent": 3}])
    lines = as_prometheus(run.look()).splitlines()
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert sum(line.startswith("aerie_gpu_use_ratio") for line in series) == 2


def test_figures_are_what_prometheus_reads(run):
    name = 'odd"name\\with\nall'
    run.folder.rename(run.folder.parent / name)
    run.folder = run.folder.parent / name
    run.status_file("train_drafter", "base", memory_gib=2.0)
    text = as_prometheus(run.look())
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert all(name.startswith("aerie_") for name in families)
    assert all(f.documentation and f.type == "gauge" for f in families.values())
    state = {
        s.labels["state"]: s.value
        for s in families["aerie_job_state"].samples
        if s.labels["stage"] == "train_drafter"
    }
    assert [k for k, v in state.items() if v] == ["running"] and len(state) == 10
    (memory,) = families["aerie_job_memory_bytes"].samples
    assert memory.value == 2 * 2**30
    assert memory.labels == {"run": name, "stage": "train_drafter", "part": "base"}
    assert families["aerie_job_units"].samples[0].labels["unit"] == "steps"


class Links(HTMLParser):
    """Whatever a page would load, and its text."""

    def __init__(self):
        super().__init__()
        self.loads, self.metas, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.loads += [v for k, v in attributes if k in ("src", "href", "srcset", "data")]
        self.metas += [dict(attributes)] if tag == "meta" else []
        assert tag not in ("script", "link", "iframe", "img")

    def handle_data(self, data):
        self.text += data


def test_the_html_page_needs_nothing_else_and_loads_itself_again(run, tmp_path):
    run.status_file(
        "train_drafter",
        "base",
        state="failed",
        reason="<script>alert(1)</script> [bold]{x}",
        ended=time.time(),
    )
    run.show("--html", str(tmp_path / "out/page.html"), "--prometheus", str(tmp_path / "a.prom"))
    page = (tmp_path / "out/page.html").read_text()
    links = Links()
    links.feed(page)
    assert links.loads == []
    assert "url(" not in page and "@import" not in page
    assert {"http-equiv": "refresh", "content": "3"} in links.metas
    assert "<script>alert(1)</script> [bold]{x}" in links.text
    assert os.listdir(tmp_path / "out") == ["page.html"]
    assert "aerie_job_state" in (tmp_path / "a.prom").read_text()


def test_json_has_the_same(run):
    run.made("import_verifier")
    found = json.loads(run.show("--json"))
    assert found["stages"][0] == {"stage": "import_verifier", "state": "done"}
    assert found["jobs"][0]["figures"] == {"layers": 30, "hidden_size": 576}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_watching_leaves_the_terminal_as_it_was(run, tmp_path, how):
    run.made("import_verifier")
    reader, terminal = pty.openpty()
    command = [sys.executable, str(SCRIPTS / "show_status.py"), str(run.folder), "--watch"]
    process = subprocess.Popen(
        [*command, "--prometheus", str(tmp_path / "a.prom")],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
    )
    os.close(terminal)
    seen = b""
    while b"import_verifier" not in seen:
        seen += os.read(reader, 1 << 16)
    # Ctrl-Z, and `fg` after the time of its next look: it goes on.
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * show_status.WATCH_SECONDS)
    process.send_signal(signal.SIGCONT)
    drawn = len(seen)
    while b"import_verifier" not in seen[drawn:]:
        seen += os.read(reader, 1 << 16)
    assert b"\x1b[?1049l" not in seen
    process.send_signal(how)
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:
            break
        seen += data
    assert process.wait(120) == 0
    entered, left = seen.rindex(b"\x1b[?1049h"), seen.rindex(b"\x1b[?1049l")
    assert entered < left
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # the cursor is shown again
    assert b"import_verifier" in seen[left:]  # and the last page stays
    assert b"Traceback" not in seen
    assert (tmp_path / "a.prom").is_file()


def test_watching_outlasts_a_folder_that_cannot_be_written(run, tmp_path):
    out, obstacle = tmp_path / "out", tmp_path / "obstacle"
    (tmp_path / "folder").mkdir()
    out.symlink_to("folder")
    page = out / "page.html"
    command = [sys.executable, str(SCRIPTS / "show_status.py"), str(run.folder), "--json"]
    process = subprocess.Popen(
        [*command, "--watch", "--html", str(page)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline()
    assert page.is_file()
    obstacle.write_text("a file is in its place")
    os.replace(obstacle, out)  # at one stroke, or it could be made anew in between
    assert all(process.stdout.readline() for _ in range(2))
    process.terminate()
    process.communicate()
    assert process.returncode == 0


def test_an_unknown_run_is_an_error_that_names_the_others(run):
    folder = run.folder.parent.parent
    run.write("logs/x/run.log")
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "show_status.py"), "other"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "results/other: no such folder; runs in results: demo" in done.stderr


def test_it_imports_no_engine_and_no_snakemake(run):
    code = (
        "import sys; sys.argv[1:] = [sys.argv[1]]; import runpy;"
        f"runpy.run_path({str(SCRIPTS / 'show_status.py')!r}, run_name='__main__');"
        "print({'torch', 'vllm', 'snakemake', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
    )
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_sparkline_shows_the_way_of_its_values():
    assert sparkline([1.0, 2.0, 3.0]) == "▁▄█" or sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    many = sparkline([float(i) for i in range(1000)])
    assert len(many) == 24 and many == "".join(sorted(many))
    assert not re.search(r"\s", many)
