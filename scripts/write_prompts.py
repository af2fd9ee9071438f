#!/usr/bin/env python3
"""Let the verifier write prompts itself: the user's turn, sampled from its chat template."""

from pathlib import Path

from aerie.common import cli
from aerie.config.loading import settings_argument
from aerie.generation.self_prompts import write_self_prompts
from aerie.verifier.fingerprint import read_fingerprint


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument(
        "--settings",
        type=settings_argument("self_prompts", "engine", "verifier"),
        required=True,
        help="these sections of the configuration, as JSON",
    )
    parser.add_argument("--progress-log", type=Path, help="file for progress as JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="self.jsonl.zst, written")
    parser.add_argument("--report", type=Path, required=True, help="self.json, written")
    args = parser.parse_args()
    write_self_prompts(
        read_fingerprint(args.verifier),
        args.settings,
        args.store,
        args.output,
        args.report,
        args.progress_log,
    )


if __name__ == "__main__":
    cli.run(main)
