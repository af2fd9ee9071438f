#!/usr/bin/env python3
"""Train one drafter on the extracted hidden states, from its last checkpoint on."""

from pathlib import Path

from aerie.common import cli
from aerie.config import Drafter
from aerie.drafter.train import train_drafter


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet")
    parser.add_argument("--lanes", type=Path, required=True, nargs="+", help="lanes' manifests")
    parser.add_argument("--vocabulary", type=Path, help="folder of t2d and d2t; absent: full")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument(
        "--settings",
        type=Drafter.model_validate_json,
        required=True,
        help="the drafter's section, as JSON",
    )
    parser.add_argument("--progress-log", type=Path, help="file for progress as JSON lines")
    parser.add_argument("--model", type=Path, required=True, help="folder, written")
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl, written")
    args = vars(parser.parse_args())
    train_drafter(args.pop("settings"), **args)


if __name__ == "__main__":
    cli.run(main)
