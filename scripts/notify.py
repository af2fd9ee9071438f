#!/usr/bin/env python3
"""Tell people, as `notify` in the configuration says, that a run failed or ended.

The workflow calls it. Never fails: what goes wrong is a warning.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

from aerie.common import cli
from aerie.common.formatting import as_duration
from aerie.watching import notify
from aerie.watching.status import BROKEN, RunStatus, gather


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("event", choices=["failure", "end"])
    parser.add_argument("run", type=Path, help="the run's folder")
    args = parser.parse_args()
    to = notify.settings()
    if to is None:
        print(f"warning: {notify.SETTINGS} is not set; nobody is told", file=sys.stderr)
        return
    for problem in notify.send(to, describe(args.event, gather(args.run))):
        print(f"warning: {problem}", file=sys.stderr)


def describe(event: str, status: RunStatus) -> dict[str, Any]:
    """What happened, from the run's files."""
    jobs = [j for j in status.jobs if j.state in BROKEN] if event == "failure" else []
    took = f" after {as_duration(status.time - status.began)}" if status.began else ""
    lines = [f"{status.run}: {'failed' if event == 'failure' else 'done'}{took}"]
    lines += [f"{j.name} {j.state}: {(j.reason or j.note).split(chr(10))[0]}" for j in jobs]
    if event == "end":
        measured = ("measure_acceptance", "measure_speed")
        lines += [f"{j.part}: {j.result}" for j in status.jobs if j.stage in measured and j.result]
    return {
        "event": event,
        "run": status.run,
        "text": "\n".join(lines),
        "host": platform.node(),
        "folder": os.path.abspath(status.folder),
        "jobs": [{"job": j.name, "state": j.state, "reason": j.reason, "log": j.log} for j in jobs],
    }


if __name__ == "__main__":
    cli.run(main)
