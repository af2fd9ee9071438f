"""The list of jobs that the workflow writes has the jobs of Snakemake's dry run."""

import json
import re

import pytest

from aerie.common.jobs import JobList
from aerie.watching.status import gather
from support.job_list import job_list
from support.workflow import STAND_IN

WIDE = {
    "run": "wide",
    "self_prompts": {"number": 10},
    "hidden_states": {"lanes": 3},
    "drafters": {
        "base": None,
        "small": {"vocabulary": 1000},
        "v1.5": {"vocabulary": 1000},
        "run": {"vocabulary": 1000},  # as the parts of stages without parts are called
        "full": {"vocabulary": "full"},
        "more": {"vocabulary": 2000, "from_checkpoint": "some/folder"},
    },
}
KEPT = {"run": "kept", "generation": {"mode": "keep"}}


@pytest.mark.parametrize("over", [WIDE, KEPT], ids=["wide", "kept"])
def test_the_list_of_jobs_is_snakemakes(project, over, tmp_path):
    file = tmp_path / "over.json"
    file.write_text(json.dumps(over))
    (project.folder / "some/folder").mkdir(parents=True)
    status, text = project.dry_run("--configfile", "config/config.yaml", str(file))
    assert status == 0, text
    made, needed = {}, {}
    folder = f"results/{over['run']}/"
    for block in text.split("\n[")[1:]:
        fields = dict(re.findall(r"^    (\w+): (.*)$", block, re.MULTILINE))
        if "log" in fields:
            name = fields["log"].removeprefix(folder + "logs/").removesuffix(".log")
            for output in fields["output"].split(", "):
                made[output] = name
            needed[name] = fields.get("input", "").split(", ")
    needs = {name: {made[i] for i in inputs if i in made} for name, inputs in needed.items()}

    fail_all_scripts(project)
    project.snakemake("--configfile", "config/config.yaml", str(file), "--retries", "0")
    jobs = JobList.read(project.folder / folder / "jobs.json").jobs
    assert {folder + j.log for j in jobs} == {f"{folder}logs/{n}.log" for n in needed}
    ids = {j.name: f"{j.stage}/{j.part}" for j in jobs}
    assert {folder + output: ids[j.name] for j in jobs for output in j.outputs} == made
    assert {ids[j.name]: {ids[n] for n in j.needs} for j in jobs} == needs


def fail_all_scripts(project):
    """Replace every script by one that fails, so that nothing is written."""
    for script in (project.folder / "scripts").glob("*.py"):
        script.write_text("raise SystemExit('error: not here')")


def test_a_run_writes_configuration_and_jobs_for_the_status(project):
    fail_all_scripts(project)
    status, _ = project.dry_run("--config", "run=tried")
    assert status == 0
    assert not (project.folder / "results/tried").exists()
    done = project.snakemake("--config", "run=tried", "--retries", "0")
    assert done.returncode == 1
    folder = project.folder / "results/tried"
    assert project.read("results/tried/config.json")["run"] == "tried"
    assert JobList.read(folder / "jobs.json") == job_list(drafters={"base": 4000})
    jobs = {j.name: j for j in gather(folder).jobs}
    assert jobs["import_verifier"].state == jobs["collect_prompts"].state == "failed"
    assert "not here" in jobs["import_verifier"].reason
    assert jobs["generate_responses"].state == "out of reach"


@pytest.mark.parametrize(("status", "attempts"), [(76, 1), (1, 2)])
def test_only_failures_that_another_attempt_may_fix_are_tried_again(project, status, attempts):
    for script in (project.folder / "scripts").glob("*.py"):
        if script.name not in ("supervise.py", "generate_responses.py"):
            script.write_text(STAND_IN)
    code = f"open('starts', 'a').write('x'); print('error: it is so'); raise SystemExit({status})"
    (project.folder / "scripts/generate_responses.py").write_text(code)
    done = project.snakemake("results/demo/responses/manifest.json")  # retries as in the profile
    assert done.returncode == 1
    assert (project.folder / "starts").read_text() == "x" * attempts
    assert ("not tried again in this run" in done.stderr) == (status == 76)
    job = next(
        j for j in gather(project.folder / "results/demo").jobs if j.stage == "generate_responses"
    )
    assert job.state == "failed"
    assert "it is so" in job.reason


def test_a_complete_run_without_a_list_of_jobs_gets_one_from_the_next_run(project):
    """As a run of an earlier version has none, and nothing to do."""
    for script in (project.folder / "scripts").glob("*.py"):
        if script.name != "supervise.py":
            script.write_text(STAND_IN)
    target = "results/demo/prompts/report.json"
    assert project.snakemake(target).returncode == 0
    path = project.folder / "results/demo/jobs.json"
    written = path.read_text()
    path.unlink()
    assert project.dry_run(target)[0] == 0
    assert not path.exists()
    done = project.snakemake(target)
    assert "Nothing to be done" in done.stderr
    assert path.read_text() == written
    assert gather(path.parent).state == "done"
