"""However a run ends, no process of it is left, and the same command continues.

The real Snakefile, supervisor and scripts/run_workflow.sh with a stand-in for the long job: it has
a child in a session of its own, as an engine has.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from aerie.common.leases import this_machine
from support.processes import end_marked, marked_processes, wait_until
from support.project import Project
from support.workflow import STAND_IN

TARGET = "results/demo/responses/manifest.json"
REAL = ("supervise.py", "find_run.py", "triage_log.py")
LONG = """
import os, subprocess, sys, time
if os.environ.get("LONG"):
    child = [sys.executable, "-c", "import time; time.sleep(1000)", "engine"]
    subprocess.Popen(child, start_new_session=True)
    print("at work", flush=True)
    time.sleep(1000)
"""


class Long:
    """A project whose responses take forever while LONG is set."""

    def __init__(self, folder):
        self.project = Project(folder)
        self.folder = folder
        for path in (folder / "scripts").glob("*.py"):
            if path.name not in REAL:
                path.write_text(STAND_IN)
        path = folder / "scripts/generate_responses.py"
        path.write_text(LONG + STAND_IN)
        with (folder / "config/config.yaml").open("a") as file:
            file.write("watch: {grace_seconds: 2}\n")
        self.mark = f"aerie-endings-{os.getpid()}"
        self.process = None

    def start(self, *options, long="1", command=("bash", "scripts/run_workflow.sh")):
        self.process = subprocess.Popen(
            [
                *(*command, sys.executable, "-m", "snakemake", "--cores", "1", "--retries", "0"),
                *(*options, TARGET),
            ],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": "", "MARK": self.mark, "LONG": long},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def until_at_work(self):
        log = self.folder / "results/demo/logs/generate_responses/run.log"
        log.unlink(missing_ok=True)
        self.start()

        def at_work() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return log.is_file() and "at work" in log.read_text()

        wait_until(at_work, "the job does not start", 300)
        found = marked_processes(self.mark)
        self.shell = psutil.Process(self.process.pid)
        (self.snakemake,) = [p for p in found if p.cmdline()[1:3] == ["-m", "snakemake"]]
        supervisors = [p for p in found if p.cmdline()[1:2] == ["scripts/supervise.py"]]
        (self.front,) = [p for p in supervisors if p.parent() not in supervisors]
        (self.job,) = [p for p in found if p.cmdline()[1:2] == ["scripts/generate_responses.py"]]
        (self.engine,) = [p for p in found if "engine" in p.cmdline()]
        return self

    def ends(self):
        """It fails, and leaves no process."""
        assert self.process.wait(timeout=200) != 0
        wait_until(lambda: not marked_processes(self.mark), "processes are left")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return Long(tmp_path_factory.mktemp("endings") / "project")


@pytest.fixture(autouse=True)
def nothing_afterwards(long):
    yield
    end_marked(long.mark)


WAYS = {
    "INT to all (Ctrl-C)": lambda x: os.killpg(x.process.pid, signal.SIGINT),
    "INT to Snakemake": lambda x: x.snakemake.send_signal(signal.SIGINT),
    "KILL to Snakemake": lambda x: x.snakemake.kill(),
    "KILL to the supervisor": lambda x: x.front.kill(),
    "KILL to the job": lambda x: x.job.kill(),
    "KILL to all": lambda x: os.killpg(x.process.pid, signal.SIGKILL),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_process_is_left_and_the_same_command_continues(long, way):
    long.until_at_work()  # after the ending of the test before
    assert len(marked_processes(long.mark)) >= 6
    WAYS[way](long)
    long.ends()
    assert not (long.folder / TARGET).exists()


def second(folder, *command, **variables):
    return subprocess.run(
        [*command, sys.executable, "-m", "snakemake", "--cores", "1", TARGET],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_second_run_on_the_same_results_refuses(long, tmp_path):
    long.until_at_work()
    script = ("bash", "scripts/run_workflow.sh")
    done = second(long.folder, *script)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Another run works in this folder ({long.folder})")

    # On a file system without flock.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/flock").write_text("#!/bin/sh\necho 'No locks available' >&2; exit 71\n")
    (tmp_path / "bin/flock").chmod(0o755)
    done = second(long.folder, *script, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr.startswith("Snakemake works in this folder already (process ")

    done = second(long.folder)
    assert done.returncode != 0
    assert "Directory cannot be locked" in done.stderr
    assert str(long.folder) in done.stderr

    # Another checkout with the same results through a link.
    other = tmp_path / "other"
    shutil.copytree(long.folder, other, ignore=shutil.ignore_patterns("results", ".snakemake"))
    (other / "results").symlink_to(long.folder / "results")
    done = second(other, *script)
    assert done.returncode != 0
    assert "results/demo: another run is at work on these results" in done.stderr
    assert f"process {long.snakemake.pid} on " in done.stderr

    # None of these disturbed it. TERM to Snakemake alone lets its jobs end.
    long.snakemake.terminate()
    time.sleep(1)
    assert long.engine.is_running()
    os.killpg(long.process.pid, signal.SIGINT)
    long.ends()


def test_a_lock_of_a_run_on_another_machine_is_left_alone(long):
    """As that machine's Snakemake would leave it: a lock, and a lease that is renewed."""
    lock = long.folder / ".snakemake/locks/0.output.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(f"{TARGET}\n")
    lease = long.folder / "results/demo/.run.lease"
    lease.parent.mkdir(parents=True, exist_ok=True)
    # The same host name and process, of a container of its own.
    who = {"machine": f"{this_machine()} 4026531", "process": os.getpid(), "started": 0}
    lease.write_text(json.dumps(who))
    long.start(long="")
    try:
        while long.process.poll() is None:
            os.utime(lease)
            time.sleep(0.2)
        out = long.process.communicate()[0]
        assert long.process.returncode == 1
        assert f"results/demo: a run is at work (process {os.getpid()} on " in out
        assert lock.exists()
    finally:
        lease.unlink()
    # Gone, as after 90 s without a sign of life: the lock is removed and the run completes.
    out = long.start(long="").communicate(timeout=300)[0]
    assert long.process.returncode == 0, out
    assert (long.folder / TARGET).is_file()
    assert not list(long.folder.glob("results/*/.run.lease"))
