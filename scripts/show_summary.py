#!/usr/bin/env python3
"""Say in a few lines what came out of a run, where it is, and how to serve it."""

from pathlib import Path

from aerie.common import cli
from aerie.report.summary import show_summary


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="its folder, such as results/demo")
    parser.add_argument(
        "--configfile", type=Path, nargs="*", default=[], help="instead: a configuration's run"
    )
    args = parser.parse_args()
    show_summary(args.run, args.configfile)


if __name__ == "__main__":
    cli.run(main)
