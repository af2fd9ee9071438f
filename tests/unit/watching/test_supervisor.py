"""The supervisor with small jobs: their status, and what is stopped, when and why."""

import contextlib
import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from aerie.watching import supervisor
from support.paths import SCRIPTS
from support.processes import wait_until
from support.supervised import QUICK


def test_the_status_shows_progress_and_figures(supervised):
    job = supervised("""
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


def test_exit_status_and_last_line_are_the_jobs(supervised):
    job = supervised("print('something'); raise SystemExit('no such layer: 77')")
    assert job.wait() == 1
    assert "no such layer: 77" in job.stderr
    assert job.status()["exit"] == 1
    assert job.status()["state"] == "failed"


def test_the_log_of_a_failed_attempt_is_kept(supervised):
    supervised("raise SystemExit('the first attempt')").wait()
    job = supervised("print('the second')")
    assert job.wait() == 0
    assert "second" in job.log()
    assert "first attempt" not in job.log()
    assert "first attempt" in (job.folder / "run.failed.log").read_text()


# The supervisor is stopped while this computes: that does not count as busy.
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
def test_a_stalled_job_is_diagnosed_and_ended(supervised, code, diagnosis):
    job = supervised(code, limits=QUICK)
    job.until("STALLED")
    assert job.wait() == 75
    found = job.status()
    assert found["state"] == "stalled"
    assert diagnosis in found["reason"]
    assert diagnosis in job.stderr
    job.reported_in_time()
    job.nothing_left()
    if "def " in code:
        name = re.search(r"def (\w+)", code)[1]
        assert re.search(rf"{name} \(.*job\.py:\d+\)", job.log())  # in the stack


FLOODS = {
    "lines": 'b"WARNING: something odd at step 12345, once more\\n" * 300',
    "one line of bytes": "bytes(range(14, 256)) * 256",
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_job_that_floods_its_log_is_stopped_in_time_and_fills_nothing(supervised, kind):
    flood = f"""
data = {FLOODS[kind]}
while True:
    os.write(1, data)
"""
    job = supervised("steps()" + flood, limits=QUICK)
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
    job.reported_in_time()
    assert 0 < most < 250 << 20
    assert (job.folder / "run.log").stat().st_size < 70 << 20
    assert "stacks of the Python processes" in job.log()
    if kind == "lines":
        assert job.status()["warnings"]["not judged"] > 10_000
        assert "it floods its log" in job.stderr
        assert job.status()["warnings"]["unknown"] > 1000


def test_failing_telemetry_is_reported_and_does_not_end_the_job(supervised, tmp_path):
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
    job = supervised(code, PYTHONPATH=str(tmp_path))
    assert job.wait() == 0, job.stderr
    assert job.log().count("WARNING: the supervisor could not look at the job: RuntimeError") == 1
    assert "the driver is gone" in job.status()["alerts"][0]


def test_odd_progress_does_not_end_the_job(supervised):
    job = supervised("""
with open("run.progress.jsonl", "a") as file:
    file.write('5\\nnull\\n[1]\\n"x"\\n{"done": 3}\\n{"phase"\\n')
step(1, accuracy=[float("nan"), 0.5], loss=2.0, phase="saving")
time.sleep(4)
""")
    assert job.wait() == 0, job.stderr
    assert job.status()["accuracy"] == ["nan", 0.5]


def test_a_stopped_process_below_the_job_is_named(supervised):
    job = supervised(
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


def test_a_job_that_ignores_sigterm_is_killed(supervised):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); steps(); time.sleep(1000)"
    job = supervised(code, limits=QUICK)
    assert job.wait() == 75
    job.nothing_left()


def test_loading_may_take_long_and_slow_steps_are_learned(supervised):
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
    job = supervised(code, limits=QUICK)
    assert job.wait() == 0, job.stderr


def test_a_suspended_run_continues(supervised):
    """Slurm stops all of its processes for a while; Ctrl-Z stops the front alone."""
    job = supervised("steps(2000)")
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


def test_endless_loading_is_a_stall(supervised):
    job = supervised("time.sleep(1000)", limits={"load_seconds": 3})
    assert job.wait() == 75
    assert "(loading)" in job.stderr


def test_a_first_compilation_is_a_phase(supervised):
    job = supervised("""
print("INFO 01-01 10:00:00 [backends.py:1] Dynamo bytecode transform time: 5.1 s")
time.sleep(1000)
""")
    path = job.folder / "run.status.json"
    wait_until(lambda: path.is_file() and job.status()["phase"] == "compiling", "it is not shown")


def test_a_stage_has_its_own_limits(supervised):
    limits = {**QUICK, "stages": {"measure_speed": {"stall_seconds": 60}}}
    job = supervised("steps(); time.sleep(4)", stage="measure_speed", limits=limits)
    assert job.wait() == 0


@pytest.mark.parametrize("loss", ["float('nan')", "float('inf')", "0.0"])
def test_an_impossible_loss_stops_at_once(supervised, loss):
    job = supervised(f"steps(5, loss=2.0); step(5, loss={loss}); time.sleep(1000)")
    assert job.wait() == 76
    assert "the loss is" in job.stderr
    assert job.status()["state"] == "stopped"
    job.nothing_left()


def test_a_permanent_failure_is_not_tried_again_in_the_same_run(supervised):
    code = "open('starts', 'a').write('x'); steps(3, loss=2.0); step(3, loss=float('nan'))"
    code += "; time.sleep(1000)"
    assert supervised(code, AERIE_SESSION="first").wait() == 76
    again = supervised(code, AERIE_SESSION="first")
    assert again.wait() == 76
    assert "not tried again in this run" in again.stderr
    assert "the loss is nan" in again.stderr
    assert "the loss is nan" in again.log()
    assert "the loss is nan" in (again.folder / "run.failed.log").read_text()
    assert (again.folder / "starts").read_text() == "x"
    # Another run tries again, and so does one by hand.
    assert supervised(code, AERIE_SESSION="second").wait() == 76
    assert supervised(code).wait() == 76
    assert (again.folder / "starts").read_text() == "xxx"


def test_only_permanent_exit_statuses_prevent_another_attempt(supervised):
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
            job = supervised(text, AERIE_SESSION=f"run {status}")
            assert job.wait() == status
            assert "it is so" in job.stderr
        assert (job.folder / "starts").read_text() == starts


def test_a_diverging_loss_is_a_warning_or_stops_the_job(supervised):
    code = "for i in range(200): step(i, loss=1.0 if i < 80 else 2.5)\ntime.sleep(2.5)"
    job = supervised(code)
    assert job.wait() == 0
    assert job.status()["warnings"] == {"loss divergence": 1}
    assert "the loss grows" in job.log()
    job = supervised(code, limits={"stop_on_divergence": True})
    assert job.wait() == 76


def test_a_full_disk_stops_before_it_is_full(supervised):
    job = supervised("steps(1000)", limits={"min_free_gib": 1e9})
    assert job.wait() == 76
    assert "GiB left" in job.stderr
    job.nothing_left()


def test_a_dead_engine_is_noticed_when_the_job_does_not(supervised):
    job = supervised(
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
