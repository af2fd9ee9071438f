#!/usr/bin/env python3
"""Show a few samples of a corpus as the verifier reads them, with counts.

Takes records of collect_prompts and raw files in any layout. Starts no engine and writes nothing.
"""

from pathlib import Path

from aerie.common import cli
from aerie.config import Samples
from aerie.corpus.inspection import inspect
from aerie.corpus.sources import parse_source


def main() -> None:
    parser = cli.parser(__doc__)
    add, defaults = parser.add_argument, Samples()
    add("--verifier", type=Path, required=True, help="folder of the verifier's checkpoint")
    add(
        "--records",
        type=parse_source,
        required=True,
        help="a file (records of collect_prompts, or any layout), folder, glob pattern or "
        "hf:DATASET; or a JSON object with the keys of corpus.sources",
    )
    add("--count", type=int, default=3, help="samples to print")
    add(
        "--mode",
        choices=("keep", "generate"),
        default="keep",
        help="keep: the corpus's own answers; generate: the prompts that the verifier answers",
    )
    add("--scan", type=int, default=1000, help="records to look at (0: all)")
    add("--characters", type=int, default=600, help="characters shown of a text")
    add("--max-length", type=int, default=defaults.max_length, help="tokens of a sample")
    add("--min-supervised-tokens", type=int, default=defaults.min_supervised_tokens)
    add("--no-reasoning", action="store_true", help="do not supervise the assistant's reasoning")
    add("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    limits = Samples(
        max_length=args.max_length,
        min_supervised_tokens=args.min_supervised_tokens,
        supervise_reasoning=not args.no_reasoning,
    )
    inspect(
        args.verifier,
        args.records,
        args.mode,
        limits,
        count=args.count,
        scan=args.scan,
        characters=args.characters,
        trust_remote_code=args.trust_remote_code,
    )


if __name__ == "__main__":
    cli.run(main)
