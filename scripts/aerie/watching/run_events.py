"""Reporting that a run failed or ended."""

import os
import platform
import sys
from pathlib import Path
from typing import Literal

from aerie.common.formatting import as_duration
from aerie.watching import notify
from aerie.watching.run_status import BROKEN, RunStatus
from aerie.watching.status import gather


def report_run(event: Literal["failure", "end"], folder: Path) -> None:
    """Report this event of the run in `folder`. Problems are warnings."""
    to = notify.settings()
    if to is None:
        print(f"warning: {notify.SETTINGS} is not set; nothing is reported", file=sys.stderr)
        return
    for problem in notify.send(to, describe(event, gather(folder))):
        print(f"warning: {problem}", file=sys.stderr)


def describe(event: Literal["failure", "end"], status: RunStatus) -> notify.Event:
    """What happened, from the run's files."""
    jobs = [j for j in status.jobs if j.state in BROKEN] if event == "failure" else []
    took = f" after {as_duration(status.time - status.began)}" if status.began else ""
    lines = [f"{status.run}: {'failed' if event == 'failure' else 'done'}{took}"]
    lines += [f"{j.name} {j.state}: {(j.reason or j.note).split(chr(10))[0]}" for j in jobs]
    if event == "end":
        measured = ("measure_acceptance", "measure_speed")
        lines += [f"{j.part}: {j.result}" for j in status.jobs if j.stage in measured and j.result]
    return notify.Event(
        event=event,
        run=status.run,
        text="\n".join(lines),
        host=platform.node(),
        folder=os.path.abspath(status.folder),
        jobs=[
            notify.FailedJob(job=j.name, state=j.state, reason=j.reason, log=j.log) for j in jobs
        ],
    )
