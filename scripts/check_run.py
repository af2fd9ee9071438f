#!/usr/bin/env python3
"""Check before a run what would stop or spoil it: versions, machine, verifier, chat template.

Starts no engine; takes under half a minute. Exit status: 0 all well (notes at most), 3 warnings,
1 errors.
"""

import sys
from pathlib import Path

from aerie.common import cli
from aerie.planning.preflight.command import check_run


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--configfile", type=Path, nargs="*", default=[], help="laid over config/config.yaml"
    )
    parser.add_argument("--config", type=cli.json_argument, help="the whole configuration, as JSON")
    parser.add_argument("--store", type=Path, help="default: the configuration's")
    parser.add_argument(
        "--elsewhere", action="store_true", help="jobs run on other machines: skip this one"
    )
    parser.add_argument("--brief", action="store_true", help="only what is not ok")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cli.prepare_to_show()
    status = check_run(
        args.config, args.configfile, args.store, args.elsewhere, args.brief, args.json
    )
    sys.exit(status)


if __name__ == "__main__":
    cli.run(main)
