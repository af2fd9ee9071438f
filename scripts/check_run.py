#!/usr/bin/env python3
"""Check before a run what would stop or spoil it: versions, machine, verifier, chat template.

Starts no engine; takes under half a minute. Exit status: 0 all well (notes at most), 3 warnings,
1 errors.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.paths import CONFIG
from aerie.common.text import printable
from aerie.config import check_paths, load_config, read_config
from aerie.planning import preflight as checks
from aerie.planning.preflight import Finding
from aerie.watching.catalogue import Catalogue

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
STATUS = {"ok": 0, "note": 0, "warning": 3, "error": 1}
SECONDS = 28.0


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--configfile", type=Path, nargs="*", default=[], help="laid over config/config.yaml"
    )
    parser.add_argument("--config", type=cli.json_argument, help="the whole configuration, as JSON")
    parser.add_argument("--store", type=Path, help="none: the configuration's")
    parser.add_argument(
        "--elsewhere", action="store_true", help="jobs run on other machines: leave this one out"
    )
    parser.add_argument("--brief", action="store_true", help="only what is not ok")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cli.prepare_to_show()
    start = time.monotonic()
    findings = check(args, start)
    if args.json:
        print(json.dumps([f.as_json() for f in findings], indent=1, ensure_ascii=False))
    else:
        show(findings, args.brief, time.monotonic() - start)
    return STATUS[checks.worst(findings)]


def check(args: Any, start: float) -> list[Finding]:
    process = checks.start_imports()
    try:
        findings = checks.check_versions(
            CONFIG / "known_versions.yaml", checks.installed_versions()
        )
        try:
            config = load_config(args.config or read_config(args.configfile))
        except InputError as error:
            return [*findings, Finding("configuration", "error", str(error))]
        try:
            check_paths(config)
        except InputError as error:
            findings.append(Finding("configuration", "error", str(error)))
        store = args.store or Path(config.store)
        findings += checks.check_verifier(config, store)
        findings += checks.check_endpoints(config.generation.endpoints)
        left = max(5.0, SECONDS - (time.monotonic() - start))
        catalogue = Catalogue.load(CONFIG / "log_patterns.yaml")
        found, facts = checks.check_imports(process, catalogue, left)
        findings += found
        if not args.elsewhere:
            if facts:
                findings += checks.check_gpus(config, facts)
            gpus = bool(facts.get("devices"))
            findings += checks.check_room(store, gpus, config.engine.cpu_cache_gib)
        return findings
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def show(findings: list[Finding], brief: bool, seconds: float) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        if brief and finding.severity == "ok":
            continue
        text = Text(printable(finding.found))
        if finding.meaning:
            text.append(f"\n{printable(finding.meaning)}", "dim")
        if finding.advice:
            text.append(f"\n→ {printable(finding.advice)}")
        table.add_row(Text(finding.severity, STYLES[finding.severity]), finding.check, text)
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    counts = {s: sum(f.severity == s for f in findings) for s in reversed(checks.SEVERITIES)}
    summary = ", ".join(f"{n} {s}" + "s" * (n > 1 and s != "ok") for s, n in counts.items() if n)
    console.print(f"checked in {seconds:.0f} s: {summary}", markup=False)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
