"""The triage of a log file as JSON or for a terminal."""

import json
import os
import sys

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from aerie.common.errors import InputError
from aerie.common.paths import LOG_PATTERNS
from aerie.common.progress import JobProgress
from aerie.common.text import printable
from aerie.watching.catalogue import Catalogue
from aerie.watching.log_file import triage
from aerie.watching.triage import ORDER, Finding

STYLES = {
    "fatal": "bold red",
    "degraded": "yellow",
    "unknown": "magenta",
    "hint": "cyan",
    "benign": "dim",
}
SHOW_PROGRESS = 64 << 20  # bytes, from which it takes seconds
EXIT_FATAL, EXIT_UNUSABLE = 1, 2


def show_triage(name: str, as_json: bool) -> int:
    """Show what the messages in a log mean; `name`: a file, or `-` for standard input.

    Returns 0, `EXIT_FATAL` when something fatal was found, `EXIT_UNUSABLE` for a file that cannot
    be used.
    """
    try:
        findings = _read(name, Catalogue.load(LOG_PATTERNS))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except OSError as error:
        print(f"error: {name}: {error.strerror}", file=sys.stderr)
        return EXIT_UNUSABLE
    if as_json:
        print(json.dumps([f.as_json() for f in findings], indent=1, ensure_ascii=False))
    else:
        _show(Console(highlight=False), name, findings)
    return EXIT_FATAL if any(f.level == "fatal" for f in findings) else 0


def _read(name: str, catalogue: Catalogue) -> list[Finding]:
    if name == "-":
        return triage(sys.stdin.buffer, "standard input", catalogue)
    with open(name, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < SHOW_PROGRESS:
            return triage(file, name, catalogue)
        with JobProgress("triage", size >> 20, "MiB") as progress:
            done = 0

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                progress.update(done >> 20, "MiB")

            return triage(file, name, catalogue, on_bytes)


def _show(console: Console, name: str, findings: list[Finding]) -> None:
    if not findings:
        empty = name != "-" and os.path.getsize(name) == 0
        console.print(
            f"{name}: {'empty' if empty else 'no warning, no error, no traceback'}", markup=False
        )
        return
    # Hints about speed only distract from a failure.
    short = {"benign", "hint"} if findings[0].level == "fatal" else {"benign"}
    for finding in findings:
        if finding.level in short:
            continue
        head = Text(finding.level, STYLES[finding.level])
        head.append(f"  {finding.id or 'not in the catalogue'}", "bold")
        times = f", {finding.count:,} times" if finding.count > 1 else ""
        head.append(f"  line {finding.first_line:,}{times}", "dim")
        console.print(head)
        for text in (finding.text, finding.meaning, f"→ {finding.advice}"):
            console.print(Padding(Text(printable(text)), (0, 0, 0, 2), expand=False))
    for level in sorted(short, key=ORDER.index):
        names = ", ".join(f"{f.id} ({f.count:,})" for f in findings if f.level == level)
        if names:
            console.print(Text(f"{level}  {names}", STYLES[level]))
