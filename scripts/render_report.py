#!/usr/bin/env python3
"""Make the report of a run: one HTML page that opens offline."""

import datetime
import subprocess
from pathlib import Path

from aerie.common import cli
from aerie.common.files import write_bytes
from aerie.report.page import read_run, render

SCRIPTS = Path(__file__).resolve().parent


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--drafters", nargs="+", required=True, help="names, in this order")
    parser.add_argument(
        "--config", type=cli.json_argument, required=True, help="the whole configuration, as JSON"
    )
    parser.add_argument("--output", type=Path, required=True, help="report.html")
    args = parser.parse_args()

    run = read_run(args.run, args.drafters, args.config)
    page = render(run, SCRIPTS / "aerie/report/report.html.j2", _facts())
    # An id may hold half a surrogate pair, which UTF-8 cannot.
    write_bytes(args.output, page.encode("utf-8", "backslashreplace"))


def _facts() -> dict[str, str]:
    """When the page was made, and by which version of the code where that is known."""
    facts = {"Made": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")}
    command = ["git", "-C", str(SCRIPTS), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        facts["Aerie"] = found.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return facts


if __name__ == "__main__":
    cli.run(main)
