#!/usr/bin/env python3
"""Resolve envs/dependencies.toml with pip and write the lock files beside it.

    python envs/lock.py                    all of them
    python envs/lock.py cpu dev            some of them
    python envs/lock.py gpu --python 3.12=/path/to/python3.12

For each environment pip resolves the direct dependencies as a dry run, under the
Python the environment is for, in a throwaway venv. What is then written is every
package that can be reached from the direct dependencies without passing through
one that dependencies.toml leaves out. pip cannot leave a dependency out itself,
so the locks are complete and are installed with `pip install --no-deps`.

Writes NAME.lock, and for cpu and gpu NAME.post-deploy.sh, the installer that
`snakemake --sdm conda` runs in the environment of NAME.yaml. Takes some minutes an
environment; run it on Linux x86-64, where the locks are for.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ENVS = Path(__file__).resolve().parent
NAMES = ("cpu", "gpu", "dev")  # dev is resolved beside cpu.lock

# Runs in the throwaway venv: reads pip's report, prints the packages reached as
# [name, version] pairs. `packaging` there is pip's own copy.
WALK = """
import json, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

report, direct, without = json.loads(sys.stdin.read())
installed = [item["metadata"] for item in report["install"]]
found = {canonicalize_name(metadata["name"]): metadata for metadata in installed}
without = {canonicalize_name(name) for name in without}
todo, seen = [Requirement(line) for line in direct], set()
while todo:
    requirement = todo.pop()
    name = canonicalize_name(requirement.name)
    if name in without:
        continue
    # A dependency counts when its marker holds, for no extra or for one asked for.
    for extra in {"", *requirement.extras}:
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for line in found[name].get("requires_dist", []):
            dependency = Requirement(line)
            if dependency.marker is None or dependency.marker.evaluate({"extra": extra}):
                todo.append(dependency)
print(json.dumps(sorted({(name, found[name]["version"]) for name, _ in seen})))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="locks to make: cpu, gpu, dev (default: all)"
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="VERSION=PROGRAM",
        help="the interpreter for a version (default: pythonVERSION)",
    )
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no such lock: {', '.join(sorted(unknown))} (there are: {', '.join(NAMES)})")
    pythons = dict(item.split("=", 1) for item in args.python)

    lists = tomllib.loads((ENVS / "dependencies.toml").read_text())
    chosen = [name for name in NAMES if name in (args.names or NAMES)]
    for name in chosen:  # every interpreter is looked at before pip runs for minutes
        find_python(lists[name]["python"], pythons)
    for name in chosen:
        write_lock(name, lists, pythons)


def write_lock(name: str, lists: dict, pythons: dict[str, str]) -> None:
    environment = lists[name]
    left_out = lists["without"] + environment.get("without", [])
    direct = environment["dependencies"] + (lists["common"] if name != "dev" else [])
    beside = read_lock("cpu") if name == "dev" else {}

    pins = dict(resolve(direct, left_out, environment["python"], pythons, beside))
    if name == "dev":
        pins = {package: version for package, version in pins.items() if package not in beside}
    else:
        pins |= dict(line.split("==") for line in lists["alone"])
    lines = [f"{package}=={pins[package]}" for package in sorted(pins)]

    header = [
        f"# {name}.lock: {len(lines)} packages for Python {environment['python']}, Linux x86-64.",
        "# Made by `make lock` (envs/lock.py) from envs/dependencies.toml; edit that file.",
        "# Complete: install with `pip install --no-deps`"
        + (", after cpu.lock or gpu.lock." if name == "dev" else f"; see `make env{flag(name)}`"),
    ]
    if name != "dev":
        header.append(f"# Left out, with what only they need: {', '.join(left_out)}.")
    (ENVS / f"{name}.lock").write_text("\n".join(header + lines) + "\n")
    if name != "dev":
        (ENVS / f"{name}.post-deploy.sh").write_text(post_deploy(name, lines))
    print(f"{name}.lock: {len(lines)} packages", flush=True)


def resolve(
    direct: list[str],
    left_out: list[str],
    version: str,
    pythons: dict[str, str],
    beside: dict[str, str],
) -> list[list[str]]:
    """The packages reached from `direct`, as [name, version], in the versions pip chooses."""
    with tempfile.TemporaryDirectory(prefix="aerie-lock-") as folder:
        program = find_python(version, pythons)
        subprocess.run([program, "-m", "venv", f"{folder}/venv"], check=True)
        python = f"{folder}/venv/bin/python"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)

        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{name}=={pin}\n" for name, pin in beside.items()))
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--prefer-binary"]
        options += ["--constraint", str(constraints), "--report", str(report)]
        subprocess.run([*pip, *options, *direct], check=True)

        question = json.dumps([json.loads(report.read_text()), direct, left_out])
        answer = subprocess.run(
            [python, "-c", WALK], input=question, text=True, check=True, stdout=subprocess.PIPE
        )
        return json.loads(answer.stdout)


def find_python(version: str, pythons: dict[str, str]) -> str:
    program = shutil.which(pythons.get(version, f"python{version}")) or ""
    ask = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    found = subprocess.run(ask, capture_output=True, text=True).stdout.strip() if program else ""
    if found != version:
        sys.exit(
            f"lock.py: Python {version} is needed to resolve for it, but "
            f"{pythons.get(version, f'python{version}')} is {found or 'not there or broken'}; "
            f"name it with --python {version}=/path/to/python{version} "
            f"(make lock PYTHON{version.replace('.', '')}=/path/to/python{version})."
        )
    return program


def read_lock(name: str) -> dict[str, str]:
    text = (ENVS / f"{name}.lock").read_text()
    return dict(re.findall(r"^([^#\s=]+)==(\S+)$", text, flags=re.MULTILINE))


def flag(name: str) -> str:
    return " GPU=1" if name == "gpu" else ""


def post_deploy(name: str, lines: list[str]) -> str:
    return f"""\
#!/usr/bin/env bash
# Made by `make lock` from {name}.lock; edit envs/dependencies.toml instead.
# `snakemake --sdm conda` runs this in the new environment of {name}.yaml. The list is
# in here because Snakemake copies the file away from its neighbours, and because its
# content then decides when the environment is made anew. Conda's own `pip:` section
# cannot install without dependencies, and so would bring what is left out.
set -euo pipefail
python -m pip install --no-deps ${{AERIE_TORCH_INDEX:+--extra-index-url "$AERIE_TORCH_INDEX"}} \\
    --requirement /dev/stdin <<'LOCK'
{os.linesep.join(lines)}
LOCK
"""


if __name__ == "__main__":
    main()
