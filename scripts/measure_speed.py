#!/usr/bin/env python3
"""Time the verifier without and with the drafter: same prompts, same engine settings, one job."""

from pathlib import Path

from aerie.common import cli
from aerie.config.loading import settings_argument
from aerie.evaluation.speed import measure_speed
from aerie.verifier.fingerprint import read_fingerprint


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--settings",
        type=settings_argument("evaluation", "samples", "engine", "verifier"),
        required=True,
        help="sections of the configuration, as JSON",
    )
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl.zst")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--progress-log", type=Path, help="file for progress as JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="speed.json, written")
    args = parser.parse_args()
    measure_speed(
        args.settings,
        drafter=args.drafter,
        verifier=read_fingerprint(args.verifier),
        heldout=args.heldout,
        store=args.store,
        progress_log=args.progress_log,
    ).write(args.output)


if __name__ == "__main__":
    cli.run(main)
