"""Which jobs Snakemake would run, and why: a dry run whose events our logger plugin writes down."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from aerie.common.errors import InputError
from aerie.common.paths import SCRIPTS

REASONS = (
    ("Params have changed", "settings changed"),
    ("Code has changed", "its command changed"),
    ("Set of input files has changed", "other input files"),
    ("Updated input files", "changed input"),
    ("Missing output files", "not made yet"),
    ("Input files updated by another job", "something before it runs"),
    ("Forced execution", "forced"),
)
"""Snakemake's reasons and shorter ones; the first that applies is shown."""


@dataclass
class PlannedJobs:
    """The jobs of one rule that would run: how many, and short reason → number of jobs."""

    jobs: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


Planned = dict[str, PlannedJobs]
"""Rule → its jobs; a rule without jobs to run is absent."""


def dry_run(config_files: list[Path]) -> Planned:
    """What `snakemake` in this folder would run with these files laid over its configuration.

    Raises `InputError` with Snakemake's message, or the rules' own, when the dry run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "jobs.jsonl"
        command = [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "all", "--nocolor"]
        # `--quiet host` overrides a profile that asks for more silence: then errors would be lost.
        command += ["--quiet", "host", "--logger", "aerie", "--logger-aerie-jobs", str(events)]
        if config_files:
            command += ["--configfile", *map(str, config_files)]
        path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise InputError(_error(done.stdout, done.stderr))
        return read_jobs(events)


def read_jobs(path: Path) -> Planned:
    """The jobs in a file of the logger plugin, without the target rule `all`."""
    planned: Planned = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        job = json.loads(line)
        if job["rule"] != "all":
            jobs = planned.setdefault(job["rule"], PlannedJobs())
            jobs.jobs += 1
            jobs.reasons[short_reason(job["reason"])] += 1
    return planned


def short_reason(text: str) -> str:
    """Snakemake's reason in few words; the text itself when it is not a known one."""
    return next((short for words, short in REASONS if words in text), text or "unknown")


def _error(output: str, errors: str) -> str:
    """Why a dry run failed: the message that the rules ended with, else what Snakemake printed."""
    _, mark, own = ("\n" + errors).rpartition("\nerror: ")
    if mark:
        return own.strip()
    return "snakemake --dry-run failed:\n" + (output + errors).strip()[-3000:]
