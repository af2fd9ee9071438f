#!/usr/bin/env python3
"""Let the verifier answer the prompts; keep the answers and their hidden states in the store."""

from pathlib import Path

from aerie.common import cli
from aerie.config.loading import settings_argument
from aerie.generation.generate import generate_responses
from aerie.samples.shards import read_splits
from aerie.verifier.fingerprint import read_fingerprint


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--train", type=Path, required=True, help="train.jsonl.zst")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl.zst")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument(
        "--settings",
        type=settings_argument("generation", "samples", "hidden_states", "engine", "verifier"),
        required=True,
        help="these sections of the configuration, as JSON",
    )
    parser.add_argument("--progress-log", type=Path, help="file for progress as JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="manifest.json, written")
    args = parser.parse_args()
    generate_responses(
        read_splits(args.train, args.heldout),
        read_fingerprint(args.verifier),
        args.settings,
        args.store,
        args.progress_log,
    ).write(args.output)


if __name__ == "__main__":
    cli.run(main)
