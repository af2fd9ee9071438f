"""The library's structure: import contracts, types, and the map of it in docs/architecture.md."""

import re
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT, SCRIPTS


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [Path(sys.executable).with_name(program), *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(SCRIPTS)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_keep_the_contracts():
    done = run("lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout


def test_types_are_correct():
    done = run("mypy")
    assert done.returncode == 0, done.stdout


PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_every_path_in_the_architecture_page_exists():
    named = re.findall(r"`((?:aerie|scripts|rules|config|docs|tests|envs|profiles)/[^` ]+)`", PAGE)
    assert len(named) > 30
    places = [(SCRIPTS if p.startswith("aerie/") else ROOT).glob(p) for p in named]
    assert [p for p, found in zip(named, places, strict=True) if not any(found)] == []


def test_every_package_is_in_the_architecture_page():
    packages = [p.parent.name for p in (SCRIPTS / "aerie").glob("*/__init__.py")]
    assert [p for p in packages if f"`aerie/{p}/`" not in PAGE] == []
