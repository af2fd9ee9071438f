"""A copy of the workflow in a folder of its own."""

import atexit
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


class Project:
    """A copy of the workflow in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runner: subprocess.Popen | None = None
        folder.mkdir(parents=True)
        for name in ("Snakefile", "rules", "scripts", "profiles", "envs", "report", "resources"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        (folder / "config").mkdir()
        for name in ("config.yaml", "log_patterns.yaml", "known_versions.yaml"):
            shutil.copy2(ROOT / "config" / name, folder / "config")

    def snakemake(self, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "snakemake", "--cores", "2", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PYTHONPATH": ""},
        )

    def dry_run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of a dry run, by a process that has Snakemake imported."""
        if self.runner is None:
            self.runner = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/workflow/dry_runner.py")],
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": ""},
            )
            atexit.register(self.close)
        self.runner.stdin.write(json.dumps(arguments) + "\n")
        self.runner.stdin.flush()
        answer = json.loads(self.runner.stdout.readline())
        return answer["status"], answer["output"]

    def close(self) -> None:
        """End the process that makes the dry runs."""
        if self.runner is not None:
            self.runner.stdin.close()
            self.runner.wait(timeout=60)
            self.runner = None

    def planned(self, *arguments: str) -> set[str]:
        """Rules that a dry run would run."""
        status, text = self.dry_run("--quiet", "reason", *arguments)
        assert status == 0, text
        if "Nothing to be done" in text:
            return set()
        table = text[text.index("Job stats:") :].splitlines()[3:]
        rules = set()
        for line in table:
            name = line.split()[0]
            if name == "total":
                break
            rules.add(name)
        return rules - {"all"}

    def read(self, name: str):
        return json.loads((self.folder / name).read_text())
