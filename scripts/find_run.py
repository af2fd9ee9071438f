#!/usr/bin/env python3
"""Say which run is at work on a results folder, here or on another machine; exit status 1 then.

Of a run that was killed on another machine it takes a minute and a half to be sure.
"""

import sys
from pathlib import Path

from aerie.common import cli
from aerie.common.leases import Leases


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("results", type=Path, help="folder of the runs")
    args = parser.parse_args()
    leases = Leases()
    for lease in sorted(args.results.glob("*/.run.lease")):
        run = lease.parent / "run"
        if who := leases.holder(run):
            print(f"{lease.parent}: looking whether {who} is at work on it ...", file=sys.stderr)
        if who := leases.alive(run):
            print(
                f"{lease.parent}: a run is at work ({who}); wait for it, or stop it first.",
                file=sys.stderr,
            )
            sys.exit(1)


if __name__ == "__main__":
    cli.run(main)
