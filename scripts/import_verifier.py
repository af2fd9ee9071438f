#!/usr/bin/env python3
"""Find the verifier's checkpoint (or make it from a packaged GGUF file) and fingerprint it."""

from pathlib import Path

from aerie import cli
from aerie.files import write_json
from aerie.verifier import describe_verifier, locate_verifier


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--source", required=True, help="Hugging Face id, folder or package:NAME")
    parser.add_argument("--store", type=Path, required=True, help="where a made checkpoint is kept")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--output", type=Path, required=True, help="fingerprint.json")
    args = parser.parse_args()
    folder = locate_verifier(args.source, args.store)
    write_json(args.output, describe_verifier(folder, args.source, args.trust_remote_code))


if __name__ == "__main__":
    cli.run(main)
