#!/usr/bin/env python3
"""Let the verifier write prompts itself: the user's turn, sampled from its chat template."""

import time
from pathlib import Path

from aerie.chat.template import ChatTemplate, UserTurn
from aerie.common import cli
from aerie.common.files import write_json, write_json_lines
from aerie.common.progress import JobProgress
from aerie.config import load_config
from aerie.engine.in_process import Engine


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument(
        "--settings", type=cli.json_argument, required=True, help="the `self_prompts` section"
    )
    parser.add_argument("--output", type=Path, required=True, help="self.jsonl.zst, written")
    parser.add_argument("--report", type=Path, required=True, help="self.json, written")
    cli.add_engine_arguments(parser)
    args = parser.parse_args()

    settings = load_config({"self_prompts": args.settings}).self_prompts
    verifier = cli.read_fingerprint(args.verifier)
    from aerie.generation import self_prompts

    template = ChatTemplate.load(Path(verifier["path"]), args.trust_remote_code)
    key = self_prompts.attempts_key(settings, verifier["fingerprint"])
    start = time.monotonic()

    def start_engine(turn: UserTurn) -> Engine:
        return Engine(
            Path(verifier["path"]),
            load_config({"engine": args.engine}).engine,
            max_model_len=len(turn.header) + settings.max_tokens,
            trust_remote_code=args.trust_remote_code,
            seed=settings.seed,
            progress=progress,
        )

    with JobProgress("write_prompts", settings.number, "prompts", args.progress_log) as progress:
        written = self_prompts.write_prompts(
            start_engine,
            template,
            settings,
            self_prompts.AttemptStore(args.store, key),
            lambda kept, asked: progress.update(kept, f"{asked} attempts", attempts=asked),
        )
    write_json_lines(args.output, ({"prompt": prompt} for prompt in written.prompts))
    write_json(
        args.report,
        {
            "key": key,
            "verifier": verifier["fingerprint"],
            "settings": settings.model_dump(),
            **written.report(),
            "seconds": round(time.monotonic() - start, 1),
        },
    )


if __name__ == "__main__":
    cli.run(main)
