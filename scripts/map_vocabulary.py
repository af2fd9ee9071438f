#!/usr/bin/env python3
"""Choose a draft vocabulary: the most frequent supervised tokens of the training samples."""

from pathlib import Path

import numpy as np

from aerie.common import cli
from aerie.common.files import atomic_write, write_json
from aerie.samples.tokenize import read_samples
from aerie.samples.vocabulary import build_maps, count_tokens, describe_coverage


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--size", type=int, required=True, help="tokens of the draft vocabulary")
    parser.add_argument("--output", type=Path, required=True, help="folder for t2d, d2t, coverage")
    args = parser.parse_args()
    verifier = cli.read_fingerprint(args.verifier)
    rows = [r for r in read_samples(args.samples).values() if r.split == "train"]
    counts = count_tokens(rows, verifier["vocab_size"])
    for name, array in zip(("t2d", "d2t"), build_maps(counts, args.size), strict=True):
        with atomic_write(args.output / f"{name}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, array)
    write_json(
        args.output / "coverage.json",
        describe_coverage(counts, args.size, verifier["tokenizer_size"], verifier["tokenizer"]),
    )


if __name__ == "__main__":
    cli.run(main)
