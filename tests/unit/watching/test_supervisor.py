"""The supervisor with small jobs: what is logged, what is told, what is ended, and when."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from aerie.common import progress
from aerie.common.progress import JobProgress
from aerie.config import Watch
from aerie.watching import supervisor
from support.paths import SCRIPTS
from support.processes import Clock, end_marked, marked_processes, wait_until

# Generous where a busy machine could be slow, short where a test waits for it.
LIMITS = {"stall_seconds": 120, "stall_gaps": 10, "load_seconds": 120, "grace_seconds": 1}
QUICK = {"stall_seconds": 2}

# Progress as the real jobs write it, ten lines a second. `told` waits until the status has a step.
STEPS = """
import json, os, signal, subprocess, sys, time
def step(i, **values):
    line = {"time": time.time(), "stage": "s", "phase": "working", "done": i, "total": 1000}
    with open("run.progress.jsonl", "a") as file:
        file.write(json.dumps({**line, "unit": "steps", "rate": 1, **values}) + "\\n")
def steps(count=15, pause=0.1, **values):
    for i in range(count):
        step(i, **values)
        time.sleep(pause)
def told(i):
    while not os.path.exists("run.status.json") or json.load(open("run.status.json"))["done"] != i:
        time.sleep(0.1)
"""


class Watched:
    """A supervised job in a folder; `mark` finds its processes wherever they went."""

    def __init__(self, folder, code, stage="train_drafter", limits=None, **variables):
        self.folder = folder
        self.mark = f"aerie-test-{os.getpid()}-{time.monotonic_ns()}"
        (folder / "job.py").write_text(STEPS + code)
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(SCRIPTS / "supervise.py"), "--stage", stage),
                *("--log", "run.log", "--limits", json.dumps({**LIMITS, **(limits or {})}), "--"),
                *(sys.executable, "job.py"),
            ],
            cwd=folder,
            env={**os.environ, "MARK": self.mark, **variables},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout=240) -> int:
        self.stderr = self.process.communicate(timeout=timeout)[1]
        return self.process.returncode

    def log(self) -> str:
        return (self.folder / "run.log").read_text(errors="replace")

    def status(self) -> dict:
        return json.loads((self.folder / "run.status.json").read_text())

    def processes(self) -> list[psutil.Process]:
        """All that is left of it, the job's and the supervisor's."""
        return marked_processes(self.mark)

    def find(self, word: str) -> psutil.Process:
        """The process whose command line has this word; waits for it."""
        found = []

        def there() -> bool:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    if word in process.cmdline() and "--stage" not in process.cmdline():
                        found.append(process)
            return bool(found)

        wait_until(there, f"no process {word}")
        return found[0]

    def supervisors(self) -> tuple[psutil.Process, psutil.Process]:
        """The one in front and the one behind it."""
        front = psutil.Process(self.process.pid)
        (behind,) = front.children()
        return front, behind

    def until(self, text: str) -> None:
        log = self.folder / "run.log"
        wait_until(lambda: log.is_file() and text in self.log(), f"{text} did not appear", 240)

    def nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), "processes are left")

    def told_in_time(self) -> None:
        """A stall was told when the job's own pace said so, or as soon as the supervisor ran."""
        found = self.status()
        idle = float(re.search(r"no progress for (\d+) s", found["reason"])[1])
        late = 10 * supervisor.TICK_SECONDS  # what is more it does not count as the job's
        assert 2 <= idle <= found["stall_after_seconds"] + late


@pytest.fixture
def watched(tmp_path):
    started = []

    def start(*arguments, **options):
        started.append(Watched(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for job in started:
        end_marked(job.mark)


def test_output_is_logged_with_times_and_bars_folded(watched):
    job = watched("""
print("first")
sys.stderr.write("\\r  0%|  | 0/3\\r 33%|# | 1/3")
sys.stderr.flush()
time.sleep(0.2)
sys.stderr.write("\\r100%|##| 3/3\\n")
print("half a line", end="")
""")
    assert job.wait() == 0
    lines = job.log().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    texts = [line[20:] for line in lines]
    assert texts[0] == "first"
    assert texts[-3:-1] == ["100%|##| 3/3", "half a line"]
    assert len(texts) <= 5  # at most one state of the bar before the last
    assert "done" in texts[-1]


def test_the_status_tells_how_far_it_is(watched):
    job = watched("""
i = 0
while not os.path.exists("enough"):
    step(i, loss=2.5, accuracy=[0.3])
    time.sleep(0.1)
    i += 1
""")
    path = job.folder / "run.status.json"
    wait_until(lambda: path.is_file() and (job.status()["done"] or 0) >= 40, "no progress is told")
    found = job.status()
    assert found["state"] == "running"
    assert found["phase"] == "working"
    assert found["total"] == 1000
    assert found["loss"] == 2.5
    lines = (job.folder / "run.progress.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[found["done"]])
    pace = last["done"] / (last["time"] - first["time"])
    assert found["rate"] == pytest.approx(pace, rel=0.5)
    remaining = (1000 - found["done"]) / found["rate"]
    assert found["remaining_seconds"] == pytest.approx(remaining, rel=0.01)
    assert time.time() - found["updated"] < 60
    assert found["memory_gib"] > 0
    assert found["disk_free_gib"] > 0
    # Where there is a GPU, figures or the reason; without one nothing is missing.
    assert bool(found["gpus"] or found["gpus_missing"]) == Path("/dev/nvidiactl").exists()
    (job.folder / "enough").touch()
    assert job.wait() == 0
    ended, written = job.status(), (job.folder / "run.progress.jsonl").read_text().splitlines()
    assert (ended["state"], ended["exit"], ended["done"]) == ("done", 0, len(written) - 1)


def test_the_rate_counts_from_the_last_of_what_was_first_seen(tmp_path):
    files = (tmp_path / f"run.{end}" for end in ("log", "progress.jsonl", "status.json"))
    watching = supervisor.Supervisor(supervisor.Job([], "s", *files), Watch())
    # Read at once when the supervisor looked first; then a tick later each.
    for done, now in ((0, 50.0), (1, 50.0), (9, 50.0), (15, 51.0), (29, 52.0)):
        watching._take({"done": done, "total": 129}, now)
    assert watching._rate() == (10.0, 10.0)


def test_the_exit_status_is_the_jobs_and_its_last_words_are_shown(watched):
    job = watched("print('something'); raise SystemExit('no such layer: 77')")
    assert job.wait() == 1
    assert "no such layer: 77" in job.stderr
    assert job.status()["exit"] == 1
    assert job.status()["state"] == "failed"


def test_the_log_of_a_failed_attempt_is_kept(watched):
    watched("raise SystemExit('the first attempt')").wait()
    job = watched("print('the second')")
    assert job.wait() == 0
    assert "second" in job.log()
    assert "first attempt" not in job.log()
    assert "first attempt" in (job.folder / "run.failed.log").read_text()


# The supervisor does not get to run while all of it is computed: that does not count as busy.
BEFORE_THE_FIRST_LOOK = """
os.kill(os.getppid(), signal.SIGSTOP)
while time.process_time() < 1: pass
steps(9, pause=0)
os.kill(os.getppid(), signal.SIGCONT)
time.sleep(1000)
"""
STALLS = {
    "steps(); os.kill(os.getpid(), signal.SIGSTOP)": "was stopped by a signal",
    "steps()\ndef endless_loop():\n    while True: pass\nendless_loop()": "cores busy",
    "steps()\ndef wait_for_ever(): time.sleep(1000)\nwait_for_ever()": "wait for something",
    BEFORE_THE_FIRST_LOOK: "wait for something",
}


@pytest.mark.parametrize(
    ("code", "diagnosis"), STALLS.items(), ids=["stopped", "loops", "waits", "not seen before"]
)
def test_a_stall_is_seen_explained_and_ended(watched, code, diagnosis):
    job = watched(code, limits=QUICK)
    job.until("STALLED")
    assert job.wait() == 75
    found = job.status()
    assert found["state"] == "stalled"
    assert diagnosis in found["reason"]
    assert diagnosis in job.stderr
    job.told_in_time()
    job.nothing_left()
    if "def " in code:
        name = re.search(r"def (\w+)", code)[1]
        assert re.search(rf"{name} \(.*job\.py:\d+\)", job.log())  # in the stack


FLOODS = {
    "lines": 'b"WARNING: something odd at step 12345, once more\\n" * 300',
    "one line of bytes": "bytes(range(14, 256)) * 256",
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_job_that_floods_its_log_is_stopped_as_soon_and_fills_nothing(watched, kind):
    flood = f"""
data = {FLOODS[kind]}
while True:
    os.write(1, data)
"""
    job = watched("steps()" + flood, limits={**QUICK, "stall_gaps": 5})
    most = 0

    def ended() -> bool:
        nonlocal most
        for process in job.processes():
            with contextlib.suppress(psutil.Error):  # it ends meanwhile
                if "--stage" in process.cmdline():
                    most = max(most, process.memory_info().rss)
        return job.process.poll() is not None

    wait_until(ended, "the job is not stopped", 240)
    assert job.wait() == 75
    job.told_in_time()
    assert 0 < most < 250 << 20
    assert (job.folder / "run.log").stat().st_size < 70 << 20
    assert "stacks of the Python processes" in job.log()
    if kind == "lines":
        assert job.status()["warnings"]["not judged"] > 10_000
        assert "it floods its log" in job.stderr
        assert job.status()["warnings"]["unknown"] > 1000


def test_a_log_that_is_full_still_has_the_end_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LONGEST_LOG", 1000)
    reading, writing = os.pipe()
    pump = supervisor.Pump(reading, tmp_path / "run.log")
    pump.start()
    os.write(writing, b"".join(b"line %d\n" % i for i in range(500)))
    os.write(writing, b"the last words\n")
    os.close(writing)
    pump.join()
    pump.say("failed")
    log = (tmp_path / "run.log").read_text()
    assert "line 0\n" in log
    assert "no more of it is kept" in log
    assert log.endswith("supervisor: failed\n")
    assert pump.last[-1] == "the last words"
    assert pump.take()[-1] == "the last words"


def test_telemetry_that_fails_does_not_end_the_job_and_is_said(watched, tmp_path):
    (tmp_path / "pynvml.py").write_text("""
class NVMLError(Exception): pass
def nvmlInit(): pass
nvmlShutdown = nvmlInit
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(i): return i
nvmlDeviceGetIndex = nvmlDeviceGetHandleByIndex
def nvmlDeviceGetName(handle): raise RuntimeError("the driver is gone")
""")
    code = """
steps(3)
step(3, phase="saving")
while "WARNING" not in open("run.log").read(): time.sleep(0.1)
time.sleep(4)  # it looks again
"""
    job = watched(code, PYTHONPATH=str(tmp_path))
    assert job.wait() == 0, job.stderr
    assert job.log().count("WARNING: the supervisor could not look at the job: RuntimeError") == 1
    assert "the driver is gone" in job.status()["alerts"][0]


def test_odd_progress_does_not_end_the_job(watched):
    job = watched("""
with open("run.progress.jsonl", "a") as file:
    file.write('5\\nnull\\n[1]\\n"x"\\n{"done": 3}\\n{"phase"\\n')
step(1, accuracy=[float("nan"), 0.5], loss=2.0, phase="saving")
time.sleep(4)
""")
    assert job.wait() == 0, job.stderr
    assert job.status()["accuracy"] == ["nan", 0.5]


def test_a_stopped_process_below_the_job_is_named(watched):
    job = watched(
        """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "worker"],
                         start_new_session=True)
steps()
child.send_signal(signal.SIGSTOP)
child.wait()
""",
        limits=QUICK,
    )
    assert job.wait() == 75
    assert "was stopped by a signal" in job.stderr
    assert "worker" in job.stderr
    job.nothing_left()


def test_a_job_that_ignores_the_request_to_end_is_killed(watched):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); steps(); time.sleep(1000)"
    job = watched(code, limits=QUICK)
    assert job.wait() == 75
    job.nothing_left()


def test_loading_may_take_long_and_slow_steps_are_learnt(watched):
    code = """
time.sleep(4)  # longer than stall_seconds, shorter than load_seconds
for i in range(3):
    step(i)
    told(i)  # so it takes a second at least
time.sleep(4)  # under 10 x 1 s
step(3)
step(4, phase="saving")
time.sleep(4)
"""
    job = watched(code, limits=QUICK)
    assert job.wait() == 0, job.stderr


def test_a_run_that_is_suspended_goes_on(watched):
    """All of its processes are stopped for a while, as by Slurm; Ctrl-Z stops the front alone."""
    job = watched("steps(2000)")
    path = job.folder / "run.status.json"
    wait_until(lambda: path.is_file() and job.status()["done"], "no progress is told")
    front, behind = job.supervisors()
    for stopped in ([front, behind, job.find("job.py")], [front]):
        for process in stopped:
            process.suspend()
        time.sleep(2 * supervisor.TICK_SECONDS)
        for process in stopped:
            process.resume()
        done = job.status()["done"]
        wait_until(lambda done=done: job.status()["done"] > done + 10, "it does not go on")
    job.process.terminate()
    assert job.wait() == 128 + signal.SIGTERM


def test_loading_without_end_is_a_stall(watched):
    job = watched("time.sleep(1000)", limits={"load_seconds": 3})
    assert job.wait() == 75
    assert "(loading)" in job.stderr


def test_a_first_compilation_is_shown_as_such(watched):
    job = watched("""
print("INFO 01-01 10:00:00 [backends.py:1] Dynamo bytecode transform time: 5.1 s")
time.sleep(1000)
""")
    path = job.folder / "run.status.json"
    wait_until(lambda: path.is_file() and job.status()["phase"] == "compiling", "it is not shown")


def test_limits_of_a_stage_are_its_own(watched):
    limits = {**QUICK, "stages": {"measure_speed": {"stall_seconds": 60}}}
    job = watched("steps(); time.sleep(4)", stage="measure_speed", limits=limits)
    assert job.wait() == 0


@pytest.mark.parametrize("loss", ["float('nan')", "float('inf')", "0.0"])
def test_an_impossible_loss_stops_at_once(watched, loss):
    job = watched(f"steps(5, loss=2.0); step(5, loss={loss}); time.sleep(1000)")
    assert job.wait() == 76
    assert "the loss is" in job.stderr
    assert job.status()["state"] == "stopped"
    job.nothing_left()


def test_what_another_attempt_does_not_mend_is_not_tried_again_in_the_same_run(watched):
    code = "open('starts', 'a').write('x'); steps(3, loss=2.0); step(3, loss=float('nan'))"
    code += "; time.sleep(1000)"
    assert watched(code, AERIE_SESSION="first").wait() == 76
    again = watched(code, AERIE_SESSION="first")
    assert again.wait() == 76
    assert "not tried again in this run" in again.stderr
    assert "the loss is nan" in again.stderr
    assert "the loss is nan" in again.log()
    assert "the loss is nan" in (again.folder / "run.failed.log").read_text()
    assert (again.folder / "starts").read_text() == "x"
    # Another run tries, and so does one by hand.
    assert watched(code, AERIE_SESSION="second").wait() == 76
    assert watched(code).wait() == 76
    assert (again.folder / "starts").read_text() == "xxx"


def test_a_job_that_says_so_itself_is_not_tried_again_and_others_are(watched):
    code = f"""
sys.path.insert(0, {str(SCRIPTS)!r})
from aerie.common import cli, errors
open("starts", "a").write("x")
class Lasting(errors.InputError):
    status = errors.EXIT_PERMANENT
def main():
    raise errors.InputError("it is so")
cli.run(main)
"""
    for text, starts, status in (
        (code.replace("errors.InputError(", "Lasting("), "x", 76),
        (code, "xxx", 1),
    ):
        for _ in range(2):
            job = watched(text, AERIE_SESSION=f"run {status}")
            assert job.wait() == status
            assert "it is so" in job.stderr
        assert (job.folder / "starts").read_text() == starts


def test_a_diverging_loss_is_a_warning_and_a_stop_when_asked_for(watched):
    code = "for i in range(200): step(i, loss=1.0 if i < 80 else 2.5)\ntime.sleep(2.5)"
    job = watched(code)
    assert job.wait() == 0
    assert job.status()["warnings"] == {"loss divergence": 1}
    assert "the loss grows" in job.log()
    job = watched(code, limits={"stop_on_divergence": True})
    assert job.wait() == 76


def test_a_full_disk_stops_before_it_is_full(watched):
    job = watched("steps(1000)", limits={"min_free_gib": 1e9})
    assert job.wait() == 76
    assert "GiB left" in job.stderr
    job.nothing_left()


def test_an_engine_that_died_is_noticed_though_the_job_is_not_told(watched):
    job = watched(
        """
import shutil
shutil.copy("/bin/sleep", "VLLM::EngineCore")
engine = subprocess.Popen(["./VLLM::EngineCore", "1000"])
steps(10)
told(9)  # and so the engine was seen
engine.kill()
time.sleep(1000)
"""
    )
    assert job.wait() == 75
    assert "VLLM::EngineCore" in job.stderr
    job.nothing_left()


# Who is killed, and what is left: a job with a child in a session of its own.
FAMILY = """
child = [sys.executable, "-c", "import time; time.sleep(1000)", "grandchild"]
subprocess.Popen(child, start_new_session=True)
print("running", flush=True)
time.sleep(1000)
"""
KILLS = {
    "TERM to the front": lambda front, behind, job: front.terminate(),
    "INT to the front": lambda front, behind, job: front.send_signal(signal.SIGINT),
    "KILL to the front": lambda front, behind, job: front.kill(),
    "KILL to the supervisor": lambda front, behind, job: behind.kill(),
    "KILL to the job": lambda front, behind, job: job.kill(),
}


@pytest.mark.parametrize("how", KILLS)
def test_whoever_is_killed_nothing_is_left(watched, how):
    job = watched(FAMILY)
    job.until("running")
    child = job.find("grandchild")
    front, behind = job.supervisors()
    assert len(job.processes()) == 4
    KILLS[how](front, behind, job.find("job.py"))
    assert job.wait() != 0
    job.nothing_left()
    assert not child.is_running()


def test_a_killed_job_is_told_from_a_failed_one(watched):
    job = watched("os.kill(os.getpid(), signal.SIGKILL)")
    assert job.wait() == 137
    assert "killed by SIGKILL" in job.stderr


def test_what_a_job_leaves_behind_is_ended(watched):
    job = watched(FAMILY.removesuffix("time.sleep(1000)\n"))
    assert job.wait() == 0
    assert "left behind" in job.log()
    job.nothing_left()


RULE = """
rule all:
    output: "never"
    log: "run.log"
    shell:
        "{python} {supervise} --stage {{rule}} --log {{log}} --limits {limits}"
        " -- {python} job.py"
"""


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_when_snakemake_ends_so_does_its_job(tmp_path, how):
    folder = tmp_path
    (folder / "job.py").write_text(STEPS + FAMILY)
    head = "import os\nos.environ['AERIE_SNAKEMAKE'] = str(os.getpid())\n"
    rule = RULE.format(
        python=sys.executable,
        supervise=SCRIPTS / "supervise.py",
        limits="'{{\\\"grace_seconds\\\": 1}}'",
    )
    (folder / "Snakefile").write_text(head + rule)
    job = Watched.__new__(Watched)
    job.folder, job.mark = folder, f"aerie-test-{os.getpid()}-{time.monotonic_ns()}"
    job.process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "1", "--retries", "0"],
        cwd=folder,
        env={**os.environ, "MARK": job.mark},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        job.until("running")
        assert len(job.processes()) >= 5
        if how == "interrupt":  # Ctrl-C reaches the whole foreground group
            os.killpg(job.process.pid, signal.SIGINT)
        else:
            job.process.kill()
        job.nothing_left()
    finally:
        end_marked(job.mark)
        job.process.wait()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_progress_of_a_job_shows_its_phases_and_its_pace(tmp_path, clock):
    log = tmp_path / "progress.jsonl"
    with JobProgress("train_drafter", 0, "steps", log, phase="loading") as bar:
        clock.sleep(0.3)
        bar.begin(500, 1000)  # gone on from a checkpoint
        bar.enter("working")
        clock.sleep(0.1)
        bar.update(600, loss=1.5)
        bar.enter("saving")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["loading", "working", "saving", "finishing"]
    assert lines[2]["done"] == 600
    assert lines[2]["loss"] == 1.5
    assert lines[2]["rate"] == pytest.approx(1000)  # 100 steps in 0.1 s; loading is none of it


def test_progress_within_a_unit_is_told(tmp_path, clock):
    log = tmp_path / "progress.jsonl"
    with JobProgress("generate_responses", 10, "records", log) as bar:
        for _ in range(12):
            clock.sleep(0.1)
            bar.beat(8)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 3  # at most one a second, and the phases
    assert lines[-1]["beats"] == 96
