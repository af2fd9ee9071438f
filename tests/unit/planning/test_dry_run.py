"""The dry run behind a plan."""

import json

import pytest

from aerie.common.errors import InputError
from aerie.planning.dry_run import dry_run, read_jobs, short_reason


def test_jobs_and_reasons_come_from_the_events(tmp_path):
    path = tmp_path / "jobs.jsonl"
    missing = "Missing output files: a.json; Input files updated by another job: b.json"
    jobs = [("train_drafter", missing), ("train_drafter", "Forced execution"), ("all", "")]
    path.write_text("".join(json.dumps({"rule": r, "reason": t}) + "\n" for r, t in jobs))
    found = read_jobs(path)
    assert set(found) == {"train_drafter"}
    assert found["train_drafter"].jobs == 2
    assert found["train_drafter"].reasons == {"not made yet": 1, "forced": 1}


def test_unknown_reason_is_shown_in_full():
    assert short_reason("The moon is full") == "The moon is full"
    assert short_reason("") == "unknown"


@pytest.mark.parametrize(
    ("snakefile", "message"),
    [
        ('import sys\nsys.exit("error: a key is wrong:\\n  samples.x: unknown")\n',
         "a key is wrong:\n  samples.x: unknown"),
        ("rule all:\n    input: 'nowhere'\n", "Missing input files for rule all"),
    ],
)  # fmt: skip
def test_failed_dry_run_raises_with_its_message(tmp_path, monkeypatch, snakefile, message):
    (tmp_path / "Snakefile").write_text(snakefile)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as fault:
        dry_run([])
    assert message in str(fault.value)
    assert str(fault.value).startswith(("a key", "snakemake --dry-run failed:"))


def test_silent_profile_hides_no_job(tmp_path, monkeypatch):
    (tmp_path / "Snakefile").write_text(
        "rule all:\n    input: 'a.1', 'a.2'\n\n"
        "rule made:\n    output: 'a.{number}'\n    shell: 'touch {output}'\n"
    )
    (tmp_path / "profiles/default").mkdir(parents=True)
    (tmp_path / "profiles/default/config.yaml").write_text("quiet: all\n")
    monkeypatch.chdir(tmp_path)
    found = dry_run([])
    assert found["made"].jobs == 2
    assert found["made"].reasons == {"not made yet": 2}
