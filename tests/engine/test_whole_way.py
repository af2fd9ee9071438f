"""The whole workflow with a tiny verifier: real vLLM, real speculators; killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.project import Project
from support.runs import configuration, logs, write, write_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_verifier):
    """A finished run: capture on, one drafter."""
    project = Project(tmp_path_factory.mktemp("whole") / "project")
    write_prompts(project.folder / "prompts.jsonl", 120)
    write_prompts(project.folder / "other.jsonl", 5, seed=1)
    write(project, configuration(tiny_verifier, "one"))
    start = time.time()
    done = project.snakemake()
    assert done.returncode == 0, logs(project, done)
    project.seconds = time.time() - start
    return project


def test_acceptance_is_reported_by_set_as_vllm_counts(whole):
    found = whole.read("results/one/evaluation/base/acceptance.json")
    assert set(found["prompt_sets"]) == {"heldout", "other"}
    for part in (found, *found["prompt_sets"].values()):
        assert part["num_drafts"] > 0
        assert part["acceptance_length"] == pytest.approx(
            1 + part["num_accepted_tokens"] / part["num_drafts"]
        )
        rates = part["acceptance_per_position"]
        assert len(rates) == 3
        assert rates == sorted(rates, reverse=True)  # cumulative
        assert sum(rates) == pytest.approx(part["acceptance_length"] - 1)


def test_speed_is_reported_for_both_sides(whole):
    found = whole.read("results/one/evaluation/base/speed.json")
    assert found["without"][0]["tokens_per_second"] > 0
    assert found["speedup"][0]["ratio"] == pytest.approx(
        found["with"][0]["tokens_per_second"] / found["without"][0]["tokens_per_second"]
    )


def test_one_pass_left_nothing_to_extract(whole):
    lane = whole.read("results/one/hidden_states/lane-0.json")
    report = whole.read("results/one/samples/report.json")
    assert lane["extracted_samples"] == 0
    assert lane["samples"] == report["train"]["samples"] + report["heldout"]["samples"] > 100
    assert whole.read("results/one/responses/manifest.json")["captured"]["failed"] == []


def test_metrics_hold_every_step_and_the_last_validation(whole):
    text = (whole.folder / "results/one/drafters/base/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [x["step"] for x in lines if not x.get("validation")]
    assert steps == list(range(len(steps)))
    assert [x["epoch"] for x in lines if x.get("validation")] == [0, 1]
    assert lines[-1]["validation"]


def test_the_drafter_is_complete_and_names_no_local_path(whole):
    model = whole.folder / "results/one/drafters/base/model"
    config = (model / "config.json").read_text()
    assert str(whole.folder) not in config
    assert "/tmp" not in config
    assert (model / "model.safetensors").stat().st_size > 0


def test_the_report_opens_offline(whole):
    text = (whole.folder / "results/one/report.html").read_text()
    assert 'src="http' not in text
    assert len(text) > 100_000


def test_nothing_is_left_to_do(whole):
    assert whole.planned() == set()


def test_two_passes_give_the_same_samples_and_shards_and_close_states(whole, tiny_verifier):
    sys.path.insert(0, str(whole.folder / "scripts"))
    import torch

    from aerie.states.shard import Shard

    first = whole.folder / "results/store/hidden_states"
    kept = whole.folder / "one-pass"
    first.rename(kept)
    values = configuration(tiny_verifier, "two", generation={"capture": False})
    write(whole, values)
    done = whole.snakemake("results/two/hidden_states/lane-0.json")
    assert done.returncode == 0, logs(whole, done)
    assert whole.read("results/two/responses/manifest.json")["generated"] == 0
    lane = whole.read("results/two/hidden_states/lane-0.json")
    assert lane["extracted_samples"] == lane["samples"]
    names = {p.name for p in kept.rglob("*.safetensors")}
    assert names == {p.name for p in first.rglob("*.safetensors")}
    compared = 0
    for path in first.rglob("*.safetensors"):
        with Shard(path) as two, Shard(kept / path.relative_to(first)) as one:
            assert [s["key"] for s in one.samples] == [s["key"] for s in two.samples]
            a, b = one.read(0), two.read(0)
            assert torch.equal(a.tokens, b.tokens)
            error = (a.states.float() - b.states.float()).norm() / b.states.float().norm()
            assert error < 0.02
            compared += 1
    assert compared > 3
    write(whole, configuration(tiny_verifier, "one"))


def killed_when(project, condition, *targets, timeout=400) -> None:
    """Start the workflow; SIGKILL its whole process group as soon as `condition` holds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2", *targets],
        cwd=project.folder,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": ""},
    )
    end = time.time() + timeout
    while not condition():
        assert process.poll() is None, "the workflow ended before it could be killed"
        assert time.time() < end, "the moment to kill it never came"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


NO_LOCKS = """
import errno, fcntl, os

def _refuse(file, *_):
    name = os.readlink(f"/proc/self/fd/{{getattr(file, 'fileno', lambda: file)()}}")
    if name.startswith({folder!r}):
        raise OSError(errno.ENOLCK, "No locks available", name)
    return _flock(file, *_)

_flock, fcntl.flock, fcntl.lockf = fcntl.flock, _refuse, _refuse
"""


def resume(project, *targets):
    """Continue as the README says: run the same command again."""
    script = project.folder / "scripts/run_workflow.sh"
    return subprocess.run(
        ["bash", str(script), sys.executable, "-m", "snakemake", "--cores", "2", *targets],
        cwd=project.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, "PYTHONPATH": ""},
    )


def test_a_run_killed_in_generation_extraction_and_training_resumes(tmp_path, tiny_verifier):
    project = Project(tmp_path / "project")
    write_prompts(project.folder / "prompts.jsonl", 160)
    write_prompts(project.folder / "other.jsonl", 5, seed=1)
    values = configuration(
        tiny_verifier, "k", generation={"capture": False}, drafter={"checkpoint_share": 0.1}
    )
    # Results and store on a file system without locks, the store in another place.
    store = tmp_path / "elsewhere/store"
    write(project, {**values, "store": str(store)})
    with (project.folder / "scripts/aerie/__init__.py").open("a") as file:
        file.write(NO_LOCKS.format(folder=str(tmp_path)))

    killed_when(project, lambda: any(store.glob("answers/*/*.zst")))
    done = resume(project, "results/k/responses/manifest.json")
    assert done.returncode == 0, logs(project, done)
    manifest = project.read("results/k/responses/manifest.json")
    assert manifest["reused"] >= 1
    assert manifest["reused"] + manifest["generated"] == 160

    killed_when(project, lambda: any(store.glob("hidden_states/*/*.safetensors")))
    done = resume(project, "results/k/hidden_states/lane-0.json")
    assert done.returncode == 0, logs(project, done)
    lane = project.read("results/k/hidden_states/lane-0.json")
    assert 0 < lane["extracted_samples"] < lane["samples"]

    killed_when(project, lambda: any(store.glob("drafters/*/checkpoints/step-*")))
    (checkpoint,) = store.glob("drafters/*/checkpoints/step-*")
    reached = int(checkpoint.name.split("-")[1])
    done = resume(project)
    assert done.returncode == 0, logs(project, done)
    text = (project.folder / "results/k/drafters/base/metrics.jsonl").read_text()
    steps = [x["step"] for x in map(json.loads, text.splitlines()) if not x.get("validation")]
    assert steps == list(range(len(steps)))
    assert len(steps) > reached > 0
    log = (project.folder / "results/k/logs/train_drafter/base.log").read_text()
    assert "Resuming" in log
    assert "Nothing to be done" in (lambda d: d.stdout + d.stderr)(resume(project))
