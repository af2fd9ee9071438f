#!/usr/bin/env python3
"""Tokenize the conversations, mark what is supervised, and cut them into shards."""

from pathlib import Path

from aerie.chat.template import ChatTemplate
from aerie.common import cli
from aerie.config.loading import settings_argument
from aerie.generation.manifest import load_answers
from aerie.samples.file import write_samples
from aerie.samples.shards import read_splits
from aerie.samples.tokenize import tokenize_samples
from aerie.verifier.fingerprint import read_fingerprint


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--train", type=Path, required=True, help="train.jsonl.zst")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl.zst")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--responses", type=Path, help="manifest.json; absent: keep own answers")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument(
        "--settings",
        type=settings_argument("samples", "hidden_states", "verifier"),
        required=True,
        help="these sections of the configuration, as JSON",
    )
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet, written")
    parser.add_argument("--shards", type=Path, required=True, help="shards.json, written")
    parser.add_argument("--report", type=Path, required=True, help="report.json, written")
    args = parser.parse_args()
    settings = args.settings
    verifier = read_fingerprint(args.verifier).folder
    splits = read_splits(args.train, args.heldout)
    made = tokenize_samples(
        splits,
        ChatTemplate.load(verifier, settings.verifier.trust_remote_code),
        load_answers(args.responses, args.store, splits) if args.responses else None,
        settings.samples,
        settings.hidden_states,
    )
    write_samples(args.samples, made.samples)
    made.shard_list.write(args.shards)
    made.report.write(args.report)


if __name__ == "__main__":
    cli.run(main)
