"""Resources of jobs, and waiting for jobs that a killed run left on Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import wait_until
from support.workflow import STAND_IN

SLURM = ("--workflow-profile", "profiles/slurm")


def asked(project, *arguments: str) -> dict[str, dict[str, int]]:
    """Resources by rule, from a dry run."""
    status, text = project.dry_run(*arguments)
    assert status == 0, text
    found = {}
    for block in re.split(r"\n(?=rule )", text):
        name = re.match(r"rule (\w+):", block)
        resources = re.search(r"^    resources: (.*)$", block, re.MULTILINE)
        if name and resources:
            pairs = re.findall(r"(\w+)=(\d+)(?:,|$)", resources[1])
            found[name[1]] = {key: int(value) for key, value in pairs}
    return {rule: values for rule, values in found.items() if rule != "all"}


def gpus(project, *arguments: str) -> dict[str, int]:
    return {rule: x["gpu"] for rule, x in asked(project, *SLURM, *arguments).items() if x["gpu"]}


def test_every_rule_declares_its_resources(project):
    found = asked(project, *SLURM)
    assert len(found) == 10
    for values in found.values():
        assert {"gpu", "mem_mb", "runtime"} <= values.keys()
    # The demo took 5.1 GB at most on two cores.
    assert all(values["mem_mb"] >= 6000 for values in found.values() if "engine" in values)


def test_gpus_follow_from_the_configuration(project):
    assert gpus(project) == {}
    of_engine = dict.fromkeys(
        ("generate_responses", "extract_hidden_states", "measure_acceptance", "measure_speed"), 1
    )
    assert gpus(project, "--config", "drafters={base: {gpus: 4}}") == {
        **of_engine,
        "train_drafter": 4,
    }
    assert gpus(project, "--config", "engine={tensor_parallel_size: 2}") == {
        rule: 2 for rule in of_engine
    }


def test_gpu8_profile_runs_lanes_side_by_side(project):
    for path in (project.folder / "scripts").glob("*.py"):
        if path.name != "supervise.py":
            path.write_text(STAND_IN + MEET)
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/gpu8", "--cores", "8"]
        + ["--config", "hidden_states={lanes: 2}", "--retries", "0", "--"]
        + [f"results/demo/hidden_states/lane-{lane}.json" for lane in range(2)],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Each lane waits for the other one.
MEET = """
import time

if name == "extract_hidden_states":
    lane = int(arguments[arguments.index("--lane") + 1])
    Path(f"here-{lane}").touch()
    end = time.time() + 200
    while not Path(f"here-{1 - lane}").exists():
        if time.time() > end:
            sys.exit("alone")
        time.sleep(0.1)
"""


def test_second_attempt_gets_more(project):
    script = project.folder / "scripts/collect_prompts.py"
    script.write_text("raise SystemExit(1)")
    done = project.snakemake("results/demo/prompts/report.json")
    assert done.returncode != 0
    tries = re.findall(r"runtime=(\d+), mem_mb=(\d+)", done.stdout + done.stderr)
    assert tries == [("60", "4000"), ("120", "8000")]


def test_more_gpus_than_the_profile_allows_stop_the_run(project):
    done = project.snakemake("--config", "drafters={base: {gpus: 4}}", "--resources", "gpu=2")
    assert done.returncode != 0
    assert "takes 4 GPU(s)" in done.stdout + done.stderr
    assert "--resources gpu=4" in done.stdout + done.stderr
    assert not (project.folder / "results/demo").exists()


# Stands for squeue: two jobs of this folder, one, then none; beside one of another folder and one
# that is not Snakemake's.
SQUEUE = """#!/usr/bin/env bash
echo asked >> asked
echo "9|rule_train_drafter|/elsewhere"
echo "8|(null)|$(pwd -P)"
case $(wc -l < asked) in
    1) echo "7|rule_extract_hidden_states_wildcards_1|$(pwd -P)" ;&
    2) echo "6|rule_extract_hidden_states_wildcards_0|$(pwd -P)" ;;
esac
"""


@pytest.fixture
def run(tmp_path):
    """Runs `run_workflow.sh`, with stand-ins for Slurm's programs and for Snakemake."""
    programs = {
        "squeue": SQUEUE,
        "scancel": '#!/bin/sh\necho "$@" > cancelled\n',
        "snakemake": "#!/bin/sh\necho started\n",
    }
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(**variables: str) -> subprocess.CompletedProcess:
        # Its Python is the one with the library.
        python = Path(sys.executable).parent
        path = f"{tmp_path / 'bin'}:{python}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", ROOT / "scripts/run_workflow.sh", "snakemake"],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_run_waits_for_jobs_of_a_killed_run(run, tmp_path):
    done = run()
    assert done.returncode == 0
    assert done.stdout == "started\n"
    said = [line for line in done.stderr.splitlines() if "Slurm still has" in line]
    assert [line.rpartition(": ")[2] for line in said] == ["7 6", "6"]
    assert len((tmp_path / "asked").read_text().split()) == 3
    assert not (tmp_path / "cancelled").exists()


def test_run_can_cancel_jobs_of_a_killed_run(run, tmp_path):
    assert run(AERIE_CANCEL_LEFT="1").stdout == "started\n"
    assert (tmp_path / "cancelled").read_text() == "6\n"


def test_silent_squeue_stops_only_runs_that_used_slurm(run, tmp_path):
    (tmp_path / "bin/squeue").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    assert run().stdout == "started\n"
    (tmp_path / ".snakemake/slurm_logs").mkdir(parents=True)
    done = run()
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no controller" in done.stderr


@pytest.mark.parametrize("in_job", [False, True])
def test_snakemake_inside_a_slurm_job_is_not_another_run(run, tmp_path, in_job):
    (tmp_path / ".snakemake/locks").mkdir(parents=True)
    (tmp_path / ".snakemake/locks/0.input.lock").touch()
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    other = subprocess.Popen(
        ["bash", "-c", 'exec -a "python -m snakemake " sleep 1000'],
        cwd=tmp_path,
        env={**os.environ, **({"AERIE_SNAKEMAKE": "1"} if in_job else {})},
    )
    try:
        cmdline = Path(f"/proc/{other.pid}/cmdline")  # bash's, too, has Snakemake in it
        wait_until(lambda: cmdline.read_bytes().startswith(b"python"), "bash gave no place")
        done = run()
        assert done.returncode == (0 if in_job else 1)
        assert ("works in this folder already" in done.stderr) == (not in_job)
    finally:
        other.kill()
        other.wait()
