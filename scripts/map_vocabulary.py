#!/usr/bin/env python3
"""Choose a draft vocabulary: the most frequent supervised tokens of the training samples."""

from pathlib import Path

from aerie.common import cli
from aerie.samples.vocabulary import map_vocabulary
from aerie.verifier.fingerprint import read_fingerprint


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--size", type=int, required=True, help="tokens of the draft vocabulary")
    parser.add_argument("--output", type=Path, required=True, help="folder for t2d, d2t, coverage")
    args = parser.parse_args()
    map_vocabulary(args.samples, args.size, read_fingerprint(args.verifier), args.output)


if __name__ == "__main__":
    cli.run(main)
