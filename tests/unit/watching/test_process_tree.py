"""No process is left, however a supervised job ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from support.paths import SCRIPTS
from support.processes import end_marked
from support.supervised import STEPS, Supervised

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
def test_no_process_is_left_whichever_is_killed(supervised, how):
    job = supervised(FAMILY)
    job.until("running")
    child = job.find("grandchild")
    front, behind = job.supervisors()
    assert len(job.processes()) == 4
    KILLS[how](front, behind, job.find("job.py"))
    assert job.wait() != 0
    job.nothing_left()
    assert not child.is_running()


def test_a_killed_job_is_distinguished_from_a_failed_one(supervised):
    job = supervised("os.kill(os.getpid(), signal.SIGKILL)")
    assert job.wait() == 137
    assert "killed by SIGKILL" in job.stderr


def test_processes_that_a_job_leaves_behind_are_ended(supervised):
    job = supervised(FAMILY.removesuffix("time.sleep(1000)\n"))
    assert job.wait() == 0
    assert "left behind" in job.log()
    job.nothing_left()


RULE = """
rule all:
    output: "never"
    log: "run.log"
    shell:
        "{python} {supervise} --stage {{rule}} --log {{log}} --settings {settings}"
        " -- {python} job.py"
"""


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_a_job_ends_with_its_snakemake(tmp_path, how):
    folder = tmp_path
    (folder / "job.py").write_text(STEPS + FAMILY)
    head = "import os\nos.environ['AERIE_SNAKEMAKE'] = str(os.getpid())\n"
    rule = RULE.format(
        python=sys.executable,
        supervise=SCRIPTS / "supervise.py",
        settings='\'{{\\"watch\\": {{\\"grace_seconds\\": 1}}}}\'',
    )
    (folder / "Snakefile").write_text(head + rule)
    job = Supervised.__new__(Supervised)
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
