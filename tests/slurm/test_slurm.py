"""The workflow on a real Slurm of one node: lanes side by side, retries, cancelling, going on.

`one_node.sh` starts it in a folder of its own. As root the packages are installed with apt where
they are missing; where that cannot be done, all tests here are skipped with the reason.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from support.models import TINY_ENGINE
from support.processes import marked_processes
from support.project import Project

pytestmark = [pytest.mark.slurm, pytest.mark.engine, pytest.mark.timeout(600)]

ONE_NODE = Path(__file__).with_name("one_node.sh")
PROGRAMS = ("slurmctld", "slurmd", "squeue", "munged")
# Looked at often; small enough for any machine.
PACE = ["--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "2"]
HEAVY = ("extract_hidden_states", "train_drafter", "measure_acceptance", "measure_speed")
SMALL = [
    *PACE,
    *("--set-threads", *(f"{rule}=1" for rule in HEAVY)),
    *("--set-resources", *(f"{rule}:mem_mb=4000" for rule in HEAVY)),
]

STAND_INS = """
import sys

rule all:
    input:
        "gpu-0.txt", "gpu-1.txt", "memory.txt", "time.txt",

rule see_a_gpu:
    output: "gpu-{n}.txt"
    resources: gpu=1, mem_mb=500, runtime=5
    shell:
        # Both at a time, or they could get the same one in turn.
        "touch gpu-{wildcards.n}.seen;"
        " for i in $(seq 240); do [ -e gpu-0.seen ] && [ -e gpu-1.seen ] && break; sleep 0.5; done;"
        " sleep 2; echo $CUDA_VISIBLE_DEVICES > {output}"

rule need_memory:
    output: "memory.txt"
    resources: mem_mb=lambda wildcards, attempt: 900 * attempt, runtime=5
    shell:
        "{sys.executable} -c 'import time; x = bytearray(1100 << 20); time.sleep(7)';"
        " echo {resources.mem_mb} > {output}"

rule need_time:
    output: "time.txt"
    resources: mem_mb=500, runtime=lambda wildcards, attempt: attempt
    shell:
        "[ {resources.runtime} -gt 1 ] || sleep 300;"
        " scontrol show job $SLURM_JOB_ID | grep -o 'TimeLimit=[^ ]*' > {output}"

rule wait:
    output: "waited.txt"
    resources: mem_mb=500, runtime=5
    shell:
        "{sys.executable} scripts/supervise.py --stage wait --log wait.log --"
        " bash -c 'sleep 300 & sleep 300; touch {output}'"
"""


def why_not() -> str | None:
    """Why these tests cannot run here; installs what is missing where that is possible."""
    if Path("/etc/slurm/slurm.conf").exists():
        return "this machine has a Slurm of its own (/etc/slurm/slurm.conf), which is left alone"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if os.geteuid() != 0:
        return "Slurm's daemons and their stand-ins for GPUs need root" + (
            f"; not installed: {', '.join(missing)}" if missing else ""
        )
    if not missing:
        return None
    if not shutil.which("apt-get"):
        return f"not installed: {', '.join(missing)}, and there is no apt-get to install them"
    # Each line may fail where the lists of packages are old or missing.
    for command in (
        "apt-get install -y --no-install-recommends slurm-wlm munge",
        "apt-get update",
        "apt-get install -y --no-install-recommends slurm-wlm munge",
    ):
        done = subprocess.run(
            command.split(),
            capture_output=True,
            text=True,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        if "install" in command and done.returncode == 0:
            return None
    return f"not installed: {', '.join(missing)}; apt-get could not: {done.stderr[-300:]}"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which Slurm's programs find the node."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    try:
        subprocess.run([ONE_NODE, "start", folder], check=True, timeout=120)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        conf = str(folder / "slurm.conf")
        yield {**os.environ, "PYTHONPATH": "", "SLURM_CONF": conf, "PATH": path}
    finally:
        subprocess.run([ONE_NODE, "stop", folder], timeout=120)


def start(project: Project, environment: dict, *arguments: str, by=()) -> subprocess.Popen:
    """Snakemake with the profile for Slurm; `by`: what stands before its command."""
    command = [*by, sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/slurm"]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=project.folder,
        env=environment,
        stdout=(project.folder / "snakemake.out").open("a"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def jobs(environment: dict, project: Project, *options: str) -> dict[str, list[str]]:
    """Slurm's jobs of this folder by id: rule with wildcards, and state."""
    done = subprocess.run(
        ["squeue", "--noheader", "--format", "%i|%k|%T|%Z", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split("|") for line in done.stdout.splitlines()]
    rows = [row for row in rows if row[3] == str(project.folder.resolve())]
    return {row[0]: row[1:3] for row in sorted(rows, key=lambda row: int(row[0]))}


def wait_until(condition, seconds: float, what: str) -> None:
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, what
        time.sleep(0.2)


def told(project: Project) -> str:
    found = [*project.folder.glob("results/*/logs/*/*.log")]
    found += project.folder.glob(".snakemake/slurm_logs/**/*.log")
    output = (project.folder / "snakemake.out").read_text()[-6000:]
    return "\n".join([output, *(f"--- {p}\n{p.read_text()[-1500:]}" for p in found)])


@pytest.fixture(scope="module")
def stand_ins(slurm, tmp_path_factory):
    """Stand-ins that meet GPUs and limits, running beside the other tests."""
    project = Project(tmp_path_factory.mktemp("stand-ins") / "project")
    (project.folder / "stand_ins.smk").write_text(STAND_INS)
    project.process = start(project, slurm, "--snakefile", "stand_ins.smk", *PACE, "all")
    yield project
    project.process.kill()
    project.process.wait()


def test_lanes_are_jobs_and_outlive_snakemake(slurm, stand_ins, tmp_path, tiny_verifier):
    project = Project(tmp_path / "project")
    rows = [
        [
            {"role": "user", "content": f"write {i} short letters about boats"},
            {"role": "assistant", "content": f"the road has {i} apples and a quiet lake " * 3},
        ]
        for i in range(120)
    ]
    text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    (project.folder / "conversations.jsonl").write_text(text)
    config = {
        "run": "s",
        "verifier": {"source": str(tiny_verifier)},
        "corpus": {"sources": ["conversations.jsonl"], "heldout_share": 0.1},
        "generation": {"mode": "keep", "max_tokens": 16},
        "samples": {"max_length": 128, "min_supervised_tokens": 4},
        "hidden_states": {"aux_layer_ids": [1, 2, 4], "samples_per_shard": 16, "lanes": 2},
        "engine": TINY_ENGINE,
        "drafters": {"base": {"vocabulary": 256}},
        "evaluation": {"max_tokens": 16},
    }
    (project.folder / "config/config.yaml").write_text(yaml.safe_dump(config))
    lanes = [f"results/s/hidden_states/lane-{lane}.json" for lane in range(2)]
    process = start(project, slurm, *lanes, *SMALL)

    def extracting() -> list[str]:
        found = jobs(slurm, project, "--states", "RUNNING")
        return [i for i, (rule, _) in found.items() if "extract_hidden_states" in rule]

    try:
        end = time.time() + 240
        while len(first := extracting()) < 2 and process.poll() is None and time.time() < end:
            time.sleep(0.5)
        assert len(first) == 2, f"{jobs(slurm, project, '--states', 'all')}\n{told(project)}"
    finally:
        # Killed while the lanes run; they go on.
        process.kill()
        process.wait()
    assert len(extracting()) == 2

    again = start(project, slurm, *lanes, *SMALL, by=["bash", "scripts/run_workflow.sh"])
    assert again.wait(timeout=300) == 0, told(project)
    output = (project.folder / "snakemake.out").read_text()
    said = re.search("Slurm still has jobs of an earlier run in this folder: (.*)", output)
    assert said, output
    assert set(said[1].split()) == set(first)
    all_jobs = jobs(slurm, project, "--states", "all")
    # The two were enough: nothing was submitted, nothing extracted a second time.
    extractions = {i: state for i, (rule, state) in all_jobs.items() if "extract" in rule}
    assert extractions == dict.fromkeys(first, "COMPLETED")
    made = [project.read(lane) for lane in lanes]
    report = project.read("results/s/samples/report.json")
    total = sum(report[split]["samples"] for split in ("train", "heldout"))
    assert sum(lane["samples"] for lane in made) == total > 100
    assert sum(lane["extracted_samples"] for lane in made) == total


def test_ctrl_c_cancels_the_jobs_and_ends_their_processes(slurm, tmp_path):
    project = Project(tmp_path / "project")
    (project.folder / "stand_ins.smk").write_text(STAND_INS)
    mark = f"aerie-slurm-{os.getpid()}"
    environment = {**slurm, "MARK": mark}
    process = start(project, environment, "--snakefile", "stand_ins.smk", *PACE, "waited.txt")
    try:
        wait_until(
            lambda: sum(p.name() == "sleep" for p in marked_processes(mark)) == 2,
            90,
            "the job does not start",
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) != 0
        wait_until(lambda: not jobs(slurm, project), 120, "the job was not cancelled")
        wait_until(lambda: not marked_processes(mark), 120, "processes are left")
    finally:
        process.kill()
        process.wait()


def test_a_job_short_of_memory_or_time_gets_more(slurm, stand_ins):
    assert stand_ins.process.wait(timeout=300) == 0, told(stand_ins)
    found = jobs(slurm, stand_ins, "--states", "all").values()
    # Slurm 22.05 without control groups calls one that it killed for its memory FAILED.
    assert [state for rule, state in found if rule == "rule_need_memory"] == ["FAILED", "COMPLETED"]
    assert (stand_ins.folder / "memory.txt").read_text() == "1800\n"
    *short, last = [state for rule, state in found if rule == "rule_need_time"]
    assert set(short) == {"TIMEOUT"}
    assert last == "COMPLETED"
    limit = (stand_ins.folder / "time.txt").read_text()
    assert limit == f"TimeLimit=00:{len(short) + 1:02}:00\n"


def test_jobs_at_a_time_get_gpus_of_their_own(stand_ins):
    assert stand_ins.process.wait(timeout=300) == 0, told(stand_ins)
    seen = [(stand_ins.folder / f"gpu-{n}.txt").read_text().strip() for n in range(2)]
    assert sorted(seen) == ["0", "1"]
