#!/usr/bin/env python3
"""Say which run is working on a results folder, here or on another machine; exit status 1 then.

For a run that was killed on another machine it takes a minute and a half to be certain.
"""

import sys
from pathlib import Path

from aerie.common import cli
from aerie.common.leases import find_running


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("results", type=Path, help="folder of the runs")
    args = parser.parse_args()
    if found := find_running(args.results):
        run, who = found
        sys.exit(f"{run}: a run is at work ({who}); wait for it, or stop it first.")


if __name__ == "__main__":
    cli.run(main)
