#!/usr/bin/env python3
"""Say what the warnings, errors and tracebacks in a log mean, and what to do about them.

Takes the log of any program. Exit status: 0, 1 when something fatal was found, 2 when the file
cannot be used.
"""

import sys

from aerie.common import cli
from aerie.watching.triage_page import show_triage


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("log", help="file, or - for standard input")
    parser.add_argument("--json", action="store_true", help="all findings as a JSON list")
    args = parser.parse_args()
    cli.prepare_to_show()
    sys.exit(show_triage(args.log, args.json))


if __name__ == "__main__":
    cli.run(main)
