#!/usr/bin/env python3
"""Say what a run would do and need, before it does it: stages, bytes, memory, hours.

Starts no engine. What would run comes from Snakemake's dry run, what is kept from the store, the
hours from rates that earlier runs measured (results/*/benchmarks and manifests), else from a
machine of config/hardware.yaml.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from aerie.common import cli
from aerie.common.errors import InputError
from aerie.config import load_config, read_config
from aerie.planning.plan import choose_hardware, make_plan
from aerie.planning.text import show

RESULTS = Path("results")
HARDWARE = Path("config/hardware.yaml")


def main() -> None:
    parser = cli.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path, nargs="*", help="laid over config/config.yaml in turn")
    parser.add_argument("--json", action="store_true", help="for machines: bytes and seconds")
    parser.add_argument("--hardware", help="a machine of the table (default: the first that fits)")
    args = parser.parse_args()
    config = load_config(read_config(args.config))
    hardware = choose_hardware(HARDWARE, args.hardware, config)
    result = make_plan(config, RESULTS / config.run, dry_run(args.config), hardware)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


def dry_run(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Jobs that Snakemake would run: rule → `jobs` (number), `reasons` (text → number)."""
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "all", "--nocolor"]
    if files:
        command += ["--configfile", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode and "\nerror: " in text:  # of the rules' own
        raise InputError(text.rpartition("\nerror: ")[2].strip())
    if done.returncode:
        raise InputError("snakemake --dry-run: " + text.strip().split("Building DAG")[-1][-3000:])
    planned: dict[str, dict[str, Any]] = {}
    for block in re.split(r"\n(?=(?:local)?(?:rule|checkpoint) \w+:\n)", text)[1:]:
        rule = re.match(r"(?:local)?\w+ (\w+):", block)[1]
        reason = re.search(r"^    reason: (.*)$", block, re.MULTILINE)
        entry = planned.setdefault(rule, {"jobs": 0, "reasons": Counter()})
        entry["jobs"] += 1
        entry["reasons"][short_reason(reason[1] if reason else "")] += 1
    planned.pop("all", None)
    return planned


def short_reason(text: str) -> str:
    """Snakemake's reason in few words: what changed first, a missing output, what ran before."""
    for words, short in (
        ("Params have changed", "settings changed"),
        ("Code has changed", "its command changed"),
        ("Set of input files has changed", "other input files"),
        ("Updated input files", "changed input"),
        ("Missing output files", "not made yet"),
        ("Input files updated by another job", "something before it runs"),
        ("Forced execution", "forced"),
    ):
        if words in text:
            return short
    return text or "unknown"


if __name__ == "__main__":
    cli.run(main)
