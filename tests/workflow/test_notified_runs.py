"""A run reports its end and its failure, and is the same when it cannot."""

import json

from support.project import Project

SECRET = "T0K3N-that-nobody-sees"


def test_failure_and_end_are_reported_and_change_nothing(project: Project, monkeypatch):
    monkeypatch.setenv("TOKEN", SECRET)
    folder = project.folder
    script = folder / "scripts/collect_prompts.py"
    works = script.read_text()
    script.write_text("raise SystemExit('error: no such file')")
    command = 'cat > "reported-$AERIE_EVENT.json"; test "$TOKEN"'
    config = folder / "notified.yaml"
    config.write_text(json.dumps({"notify": {"command": command}}))
    files = ("--configfile", "config/config.yaml", str(config), "--retries", "0")
    made = "results/demo/prompts/report.json"

    done = project.snakemake(made, *files)
    assert done.returncode == 1
    event = project.read("reported-failure.json")
    assert event["run"] == "demo"
    assert event["jobs"][0]["job"] == "collect_prompts"
    assert event["jobs"][0]["log"] == "results/demo/logs/collect_prompts/run.log"
    assert "collect_prompts failed: error: no such file" in event["text"]
    assert not (folder / "reported-end.json").exists()
    assert SECRET not in done.stdout + done.stderr

    script.write_text(works)
    done = project.snakemake(made, *files)
    assert done.returncode == 0, done.stderr
    assert project.read("reported-end.json")["event"] == "end"

    (folder / made).unlink()
    config.write_text(json.dumps({"notify": {"command": f"echo {SECRET}; exit 3"}}))
    done = project.snakemake(made, *files)
    assert done.returncode == 0, done.stderr
    assert "warning: this end was not reported by notify.command: it ended with" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert SECRET not in (folder / "results/demo/config.json").read_text()
