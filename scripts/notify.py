#!/usr/bin/env python3
"""Report, as `notify` in the configuration says, that a run failed or ended.

The workflow calls it. Never fails: problems are warnings.
"""

from pathlib import Path

from aerie.common import cli
from aerie.watching.run_events import report_run


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("event", choices=["failure", "end"])
    parser.add_argument("run", type=Path, help="the run's folder")
    args = parser.parse_args()
    report_run(args.event, args.run)


if __name__ == "__main__":
    cli.run(main)
