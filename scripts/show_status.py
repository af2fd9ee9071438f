#!/usr/bin/env python3
"""Show the state of a run, and after its end what came out and what went wrong.

Reads the files in the run's folder only, so it works on any machine that sees them.
"""

from pathlib import Path

from aerie.common import cli
from aerie.watching.show import Show, find_run


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "run", nargs="?", help="a run's folder or name (default: the configuration's)"
    )
    parser.add_argument(
        "--configfile", type=Path, nargs="*", default=[], help="laid over config/config.yaml"
    )
    parser.add_argument("--watch", action="store_true", help="renew it until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="everything known, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page for browsers")
    parser.add_argument(
        "--prometheus", type=Path, metavar="FILE", help="write figures for node-exporter (….prom)"
    )
    args = parser.parse_args()
    cli.prepare_to_show()
    folder = find_run(args.run, args.configfile)
    show = Show(folder, args.json, args.html, args.prometheus)
    show.until_signal() if args.watch else show.once()


if __name__ == "__main__":
    cli.run(main)
