#!/usr/bin/env python3
"""Collect prompts or conversations in any common layout, divided into training and held-out.

Writes OUTPUT/train.jsonl.zst, OUTPUT/heldout.jsonl.zst and OUTPUT/report.json. docs/corpus.md has
the layouts and the rules.
"""

from pathlib import Path

from aerie.common import cli
from aerie.config.loading import settings_argument
from aerie.corpus.collect import collect


def main() -> None:
    parser = cli.parser(__doc__)
    settings = settings_argument("corpus", "generation", "evaluation")
    parser.add_argument(
        "--settings",
        type=settings,
        required=True,
        help="the sections `corpus`, `generation` and `evaluation` of the configuration, as JSON",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--progress-log", type=Path, help="file for progress as JSON lines")
    args = parser.parse_args()
    corpus, evaluation = args.settings.corpus, args.settings.evaluation
    collect(
        corpus,
        args.settings.generation.mode,
        list(evaluation.prompt_sets.values()) if corpus.decontaminate else [],
        args.output,
        args.progress_log,
    )


if __name__ == "__main__":
    cli.run(main)
