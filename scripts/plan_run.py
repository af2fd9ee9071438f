#!/usr/bin/env python3
"""Say what a run would do and need, before it does it: stages, bytes, memory, hours.

Starts no engine. What would run comes from Snakemake's dry run, what is kept from the store, the
hours from rates that earlier runs measured (results/*/benchmarks and manifests), else from a
machine of config/hardware.yaml.
"""

import argparse
from pathlib import Path

from aerie.common import cli
from aerie.planning.command import plan_run


def main() -> None:
    parser = cli.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path, nargs="*", help="laid over config/config.yaml in turn")
    parser.add_argument("--json", action="store_true", help="for machines: bytes and seconds")
    parser.add_argument("--hardware", help="a machine of the table (default: the first that fits)")
    args = parser.parse_args()
    plan_run(args.config, args.hardware, args.json)


if __name__ == "__main__":
    cli.run(main)
