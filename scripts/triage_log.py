#!/usr/bin/env python3
"""Say what the warnings, errors and tracebacks in a log mean, and what to do about them.

Takes the log of any program. Exit status: 0, 1 when something fatal was found, 2 when the file
cannot be used.
"""

import json
import os
import sys

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.paths import LOG_PATTERNS
from aerie.common.progress import JobProgress
from aerie.common.text import printable
from aerie.watching.triage import ORDER, Catalogue, Finding, triage

STYLES = {
    "fatal": "bold red",
    "degraded": "yellow",
    "unknown": "magenta",
    "hint": "cyan",
    "benign": "dim",
}
SHOW_PROGRESS = 64 << 20  # bytes, from which on it takes seconds


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("log", help="file, or - for standard input")
    parser.add_argument("--json", action="store_true", help="all findings as a JSON list")
    args = parser.parse_args()
    cli.prepare_to_show()
    try:
        findings = read(args.log, Catalogue.load(LOG_PATTERNS))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {args.log}: {error.strerror}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([f.as_json() for f in findings], indent=1, ensure_ascii=False))
    else:
        show(Console(highlight=False), args.log, findings)
    return 1 if any(f.level == "fatal" for f in findings) else 0


def read(name: str, catalogue: Catalogue) -> list[Finding]:
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


def show(console: Console, name: str, findings: list[Finding]) -> None:
    if not findings:
        empty = name != "-" and os.path.getsize(name) == 0
        console.print(
            f"{name}: {'empty' if empty else 'no warning, no error, no traceback'}", markup=False
        )
        return
    # Beside a failure nobody wants to read what costs a little speed.
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


if __name__ == "__main__":
    sys.exit(main())
