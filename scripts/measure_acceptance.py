#!/usr/bin/env python3
"""Serve the drafter with vLLM on held-out and benchmark prompts; count what is accepted."""

from pathlib import Path

from aerie import config
from aerie.chat.template import ChatTemplate
from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.files import digest, digest_file, read_json, write_json
from aerie.common.progress import JobProgress
from aerie.common.versions import EVALUATION_VERSION
from aerie.corpus.prompt_sets import encode_prompts, read_heldout, read_prompt_file
from aerie.evaluation.measure import measure_acceptance


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--prompt-set", action="append", default=[], metavar="NAME=FILE", help="a benchmark"
    )
    parser.add_argument("--max-prompts", type=int, required=True, help="a set")
    parser.add_argument("--output", type=Path, required=True, help="acceptance.json")
    cli.add_serving_arguments(parser)
    cli.add_engine_arguments(parser)
    args = parser.parse_args()

    verifier = cli.read_fingerprint(args.verifier)
    template = ChatTemplate.load(Path(verifier["path"]), args.trust_remote_code)
    records = {"heldout": read_heldout(args.heldout)}
    for entry in args.prompt_set:
        name, _, path = entry.partition("=")
        records[name] = read_prompt_file(Path(path))
    room = args.max_length - args.max_tokens - args.num_speculative_tokens
    prompt_sets = {
        name: encode_prompts(found, template, args.max_prompts, room)
        for name, found in records.items()
    }
    for name, prompts in prompt_sets.items():
        if not prompts:
            raise InputError(
                f"prompt set {name}: no prompt leaves room for an answer of {args.max_tokens} "
                f"tokens within {args.max_length}"
            )
    settings = {
        "num_speculative_tokens": args.num_speculative_tokens,
        "max_prompts": args.max_prompts,
        "max_tokens": args.max_tokens,
        "max_length": args.max_length,
        "temperature": 0.0,
        "engine": args.engine,
    }
    weights = [digest_file(args.drafter / f) for f in ("config.json", "model.safetensors")]
    key = digest(EVALUATION_VERSION, verifier["fingerprint"], weights, settings, prompt_sets)
    kept = args.store / "acceptance" / f"{key}.json"
    if not kept.is_file():
        from aerie.engine.in_process import Engine

        total = sum(len(p) for p in prompt_sets.values())
        with (
            JobProgress("measure_acceptance", total, "prompts", args.progress_log) as progress,
            Engine(
                Path(verifier["path"]),
                config.Engine.model_validate(args.engine),
                max_model_len=args.max_length,
                trust_remote_code=args.trust_remote_code,
                drafter=args.drafter,
                num_speculative_tokens=args.num_speculative_tokens,
                count=True,
                progress=progress,
            ) as engine,
        ):
            found = measure_acceptance(
                engine,
                prompt_sets,
                args.max_tokens,
                args.num_speculative_tokens,
                progress.update,
            )
        write_json(kept, {**found["heldout"], "prompt_sets": found, "settings": settings})
    write_json(args.output, read_json(kept))


if __name__ == "__main__":
    cli.run(main)
