#!/usr/bin/env python3
"""Find the verifier's checkpoint (or convert a packaged GGUF file) and fingerprint it.

The configuration is compared with it before anything expensive starts.
"""

from pathlib import Path

from aerie.common import cli
from aerie.config.loading import settings_argument
from aerie.planning.import_verifier import import_verifier

SECTIONS = (
    "verifier",
    "corpus",
    "self_prompts",
    "generation",
    "samples",
    "hidden_states",
    "engine",
    "drafters",
    "evaluation",
)


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--settings", type=settings_argument(*SECTIONS), required=True, help="sections, as JSON"
    )
    parser.add_argument("--store", type=Path, required=True, help="for a converted checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="fingerprint.json, written")
    args = parser.parse_args()
    import_verifier(args.settings, args.store, args.output)


if __name__ == "__main__":
    cli.run(main)
