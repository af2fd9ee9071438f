#!/usr/bin/env python3
"""Compare the configuration with the verifier before anything expensive starts."""

from pathlib import Path

from aerie import cli
from aerie.config import load_config
from aerie.files import write_json
from aerie.verifier import check_config


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--config", type=cli.json_argument, required=True, help="as JSON")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    fingerprint = cli.read_fingerprint(args.verifier)
    write_json(args.output, check_config(load_config(args.config), fingerprint))


if __name__ == "__main__":
    cli.run(main)
