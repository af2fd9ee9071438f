"""`make check`: all checks, in under half a minute."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aerie.common.errors import InputError
from aerie.common.paths import CONFIG, LOG_PATTERNS
from aerie.common.text import printable
from aerie.config import check_paths, load_config, read_config
from aerie.planning.preflight.gpus import check_gpus
from aerie.planning.preflight.imports import check_imports, start_imports
from aerie.planning.preflight.machine import check_disk_room, check_endpoints
from aerie.planning.preflight.result import SEVERITIES, CheckResult, worst
from aerie.planning.preflight.verifier import check_verifier
from aerie.planning.preflight.versions import check_versions, installed_versions
from aerie.watching.catalogue import Catalogue

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
STATUS = {"ok": 0, "note": 0, "warning": 3, "error": 1}
"""Exit status by the gravest severity."""
SECONDS = 28.0
"""What all checks together may take."""
LEAST_SECONDS = 5.0
"""What the imports get in any case."""


def check_run(
    values: dict[str, Any] | None,
    config_files: list[Path],
    store: Path | None,
    elsewhere: bool,
    brief: bool,
    as_json: bool,
) -> int:
    """Check a configuration, print what was found, and return the exit status.

    `values`: the whole configuration; None: `config_files` laid over the default one. `store`:
    None for the configuration's. `elsewhere`: jobs run on other machines, so this one is not
    checked. `brief`: print only what is not ok.
    """
    start = time.monotonic()
    results = run_checks(values, config_files, store, elsewhere)
    if as_json:
        print(json.dumps([r.as_json() for r in results], indent=1, ensure_ascii=False))
    else:
        show(results, brief, time.monotonic() - start)
    return STATUS[worst(results)]


def run_checks(
    values: dict[str, Any] | None, config_files: list[Path], store: Path | None, elsewhere: bool
) -> list[CheckResult]:
    """The results of all checks; without a valid configuration, of those that need none."""
    start = time.monotonic()
    process = start_imports()
    try:
        results = check_versions(CONFIG / "known_versions.yaml", installed_versions())
        try:
            config = load_config(values or read_config(config_files))
        except InputError as error:
            return [*results, CheckResult("configuration", "error", str(error))]
        try:
            check_paths(config)
        except InputError as error:
            results.append(CheckResult("configuration", "error", str(error)))
        store = store or Path(config.store)
        results += check_verifier(config, store)
        results += check_endpoints(config.generation.endpoints)
        left = max(LEAST_SECONDS, SECONDS - (time.monotonic() - start))
        found, facts = check_imports(process, Catalogue.load(LOG_PATTERNS), left)
        results += found
        if not elsewhere:
            if facts:
                results += check_gpus(config, facts)
            gpus = bool(facts.get("devices"))
            results += check_disk_room(store, gpus, config.engine.cpu_cache_gib)
        return results
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def show(results: list[CheckResult], brief: bool, seconds: float) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for result in results:
        if brief and result.severity == "ok":
            continue
        text = Text(printable(result.found))
        if result.meaning:
            text.append(f"\n{printable(result.meaning)}", "dim")
        if result.advice:
            text.append(f"\n→ {printable(result.advice)}")
        table.add_row(Text(result.severity, STYLES[result.severity]), result.check, text)
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    counts = {s: sum(r.severity == s for r in results) for s in reversed(SEVERITIES)}
    summary = ", ".join(f"{n} {s}" + "s" * (n > 1 and s != "ok") for s, n in counts.items() if n)
    console.print(f"checked in {seconds:.0f} s: {summary}", markup=False)
