"""Two checkouts with one store, the same prompts and the real engine, at the same time."""

import os
import subprocess
import sys

import pytest
import yaml

from support.project import Project
from support.runs import configuration, write_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_two_runs_on_one_store_answer_and_extract_everything_once(tmp_path, tiny_verifier):
    lane = "results/two/hidden_states/lane-0.json"
    runs = []
    for name in ("one", "other"):
        project = Project(tmp_path / name)
        write_prompts(project.folder / "prompts.jsonl", 160)
        write_prompts(project.folder / "other.jsonl", 5, seed=1)
        values = {**configuration(tiny_verifier, "two"), "store": str(tmp_path / "store")}
        (project.folder / "config/config.yaml").write_text(yaml.safe_dump(values))
        process = subprocess.Popen(
            [sys.executable, "-m", "snakemake", "--cores", "1", "--retries", "0", lane],
            cwd=project.folder,
            env={**os.environ, "PYTHONPATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        runs.append((project, process))
    for _, process in runs:
        out, _ = process.communicate(timeout=500)
        assert process.returncode == 0, out
    answers = [project.read("results/two/responses/manifest.json") for project, _ in runs]
    assert sum(a["generated"] for a in answers) == 160
    assert [a["generated"] + a["reused"] for a in answers] == [160, 160]
    lanes = [project.read(lane) for project, _ in runs]
    assert lanes[0]["shards"] == lanes[1]["shards"]
    captured = sum(a["captured"]["shards"] for a in answers)
    extracted = {s["id"] for x in lanes for s in x["shards"]}
    again = sum(x["extracted_samples"] for x in lanes)
    print("generated", [a["generated"] for a in answers], "captured", captured, "of",
          len(extracted), "shards; extracted later", again)  # fmt: skip
    # A lane extracts only what generation did not capture, which is nothing here.
    assert (captured, again) == (len(extracted), 0)
    assert not list((tmp_path / "store").rglob("*.lease"))
