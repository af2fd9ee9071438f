"""Reading the results of a run: damaged files are named."""

import re
import subprocess
import sys

import pytest

from aerie.common.errors import InputError
from aerie.common.paths import SCRIPTS
from aerie.config import Config
from aerie.config.loading import sections_json
from aerie.report.run import REPORTED_SECTIONS, read_run


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("samples/report.json", '{"records_in": 1', "not readable as JSON"),
        ("samples/report.json", '{"records_in": 1}', "report.json: records_kept: Field required"),
        (
            "evaluation/base/speed.json",
            "[]",
            "speed.json: the file: Input should be a valid",
        ),
        ("drafters/base/metrics.jsonl", '{"step": 0, "loss"', "line 1 is not a line of metrics"),
        ("drafters/base/metrics.jsonl", "7\n", "line 1 is not a line of metrics"),
        ("hidden_states/lane-0.json", None, "no such file"),
        ("responses/manifest.json", None, "no such file"),
    ],
)
def test_damaged_file_is_named(fake, name, text, words):
    run = fake().write()
    path = run.folder / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError, match=re.escape(words)) as fault:
        read_run(run.folder, ["base"], run.settings)
    assert str(path) in str(fault.value)


def test_unconfigured_drafter_is_named(fake):
    run = fake().write()
    with pytest.raises(InputError, match=r"--drafters: other not among .*: base"):
        read_run(run.folder, ["other"], run.settings)


def test_script_ends_with_one_line_for_a_damaged_file(fake):
    run = fake().write()
    (run.folder / "verifier/fingerprint.json").write_text("{")
    settings = sections_json(run.settings, *REPORTED_SECTIONS)
    found = subprocess.run(
        [sys.executable, SCRIPTS / "render_report.py", "--run", run.folder, "--drafters", "base",
         "--settings", settings, "--output", run.folder / "report.html"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert found.stderr.startswith("error: ") and "fingerprint.json" in found.stderr
    assert not (run.folder / "report.html").exists()


def test_configuration_of_the_fake_run_is_valid(fake):
    assert Config.model_validate(fake().config).run == "trial"
