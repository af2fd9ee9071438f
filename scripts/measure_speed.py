#!/usr/bin/env python3
"""Time the verifier without and with the drafter: same prompts, same engine settings, one job."""

import platform
from pathlib import Path

from aerie import config
from aerie.chat.template import ChatTemplate
from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.files import digest, digest_file, read_json, write_json
from aerie.common.machine import describe_machine
from aerie.common.versions import EVALUATION_VERSION
from aerie.corpus.prompt_sets import encode_prompts, read_heldout
from aerie.evaluation.measure import measure_speed


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--prompts", type=int, required=True, help="how many")
    parser.add_argument("--concurrency", type=int, required=True, nargs="+")
    parser.add_argument("--output", type=Path, required=True, help="speed.json")
    cli.add_serving_arguments(parser)
    cli.add_engine_arguments(parser)
    args = parser.parse_args()

    verifier = cli.read_fingerprint(args.verifier)
    template = ChatTemplate.load(Path(verifier["path"]), args.trust_remote_code)
    room = args.max_length - args.max_tokens - args.num_speculative_tokens
    prompts = encode_prompts(read_heldout(args.heldout), template, args.prompts, room)
    if not prompts:
        raise InputError(
            f"{args.heldout}: no prompt leaves room for an answer of {args.max_tokens} tokens "
            f"within {args.max_length}"
        )
    settings = {
        "num_speculative_tokens": args.num_speculative_tokens,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "max_length": args.max_length,
        "concurrency": args.concurrency,
        "temperature": 0.0,
        "engine": args.engine,
    }
    weights = [digest_file(args.drafter / f) for f in ("config.json", "model.safetensors")]
    key = digest(
        EVALUATION_VERSION, platform.node(), verifier["fingerprint"], weights, settings, prompts
    )
    kept = args.store / "speed" / f"{key}.json"
    if not kept.is_file():
        common = {
            "model": Path(verifier["path"]),
            "settings": config.Engine.model_validate(args.engine),
            "max_model_len": args.max_length,
            "trust_remote_code": args.trust_remote_code,
        }
        found = measure_speed(
            common,
            args.drafter,
            args.num_speculative_tokens,
            prompts,
            args.max_tokens,
            args.concurrency,
            args.progress_log,
        )
        write_json(kept, {**found, "settings": settings, "machine": describe_machine()})
    write_json(args.output, read_json(kept))


if __name__ == "__main__":
    cli.run(main)
