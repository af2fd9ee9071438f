#!/usr/bin/env python3
"""Find the verifier's checkpoint (or make it from a packaged GGUF file) and fingerprint it.

The configuration is compared with it before anything expensive starts.
"""

from pathlib import Path

from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.files import write_json
from aerie.config import load_config
from aerie.planning.preflight.verifier import check_verifier
from aerie.verifier.checkpoint import check_config, describe_verifier, locate_verifier


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--source", required=True, help="Hugging Face id, folder or package:NAME")
    parser.add_argument("--store", type=Path, required=True, help="where a made checkpoint is kept")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument(
        "--check", type=cli.json_argument, help="a configuration that has to fit, as JSON"
    )
    parser.add_argument("--output", type=Path, required=True, help="fingerprint.json")
    args = parser.parse_args()
    folder = locate_verifier(args.source, args.store)
    fingerprint = describe_verifier(folder, args.source, args.trust_remote_code)
    if args.check is not None:
        config = load_config(args.check)
        check_config(config, fingerprint)
        # What `make check` could not look at before the verifier was here.
        findings = [f for f in check_verifier(config, args.store) if f.severity != "ok"]
        for found in findings:
            print(f"{found.severity}: {found.check}: {found.found} {found.meaning} {found.advice}")
        errors = [f"{f.check}: {f.found}; {f.advice}" for f in findings if f.severity == "error"]
        if errors:
            raise InputError("the verifier cannot be used:\n  " + "\n  ".join(errors))
    write_json(args.output, fingerprint)


if __name__ == "__main__":
    cli.run(main)
