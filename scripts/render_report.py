#!/usr/bin/env python3
"""Make the report of a run: one HTML page that opens offline."""

from pathlib import Path

from aerie.common import cli
from aerie.config.loading import settings_argument
from aerie.report.page import render_report
from aerie.report.run import REPORTED_SECTIONS


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--drafters", nargs="+", required=True, help="names, in this order")
    parser.add_argument(
        "--settings",
        type=settings_argument(*REPORTED_SECTIONS),
        required=True,
        help="the configuration, as JSON",
    )
    parser.add_argument("--output", type=Path, required=True, help="report.html")
    args = parser.parse_args()
    render_report(args.run, args.drafters, args.settings, args.output)


if __name__ == "__main__":
    cli.run(main)
