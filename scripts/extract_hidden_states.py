#!/usr/bin/env python3
"""One lane: extract the hidden states of its share of the samples into shards."""

from pathlib import Path

from aerie.common import cli
from aerie.config.loading import settings_argument
from aerie.extraction.run import extract_lane
from aerie.verifier.fingerprint import read_fingerprint


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet")
    parser.add_argument("--shards", type=Path, required=True, help="shards.json")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--lane", type=int, required=True, help="number of this lane, from 0")
    parser.add_argument(
        "--settings",
        type=settings_argument("hidden_states", "samples", "engine", "verifier"),
        required=True,
        help="JSON: the sections hidden_states, samples, engine and verifier",
    )
    parser.add_argument("--progress-log", type=Path, help="file for progress as JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="the lane's manifest")
    args = parser.parse_args()
    extract_lane(
        args.settings,
        read_fingerprint(args.verifier),
        samples=args.samples,
        shards=args.shards,
        store_folder=args.store,
        lane=args.lane,
        output=args.output,
        progress_log=args.progress_log,
    )


if __name__ == "__main__":
    cli.run(main)
