#!/usr/bin/env python3
"""Let the verifier answer the prompts; keep answers, and their hidden states, by content."""

import argparse
import contextlib
import sys
import time
from pathlib import Path

from aerie.chat.template import ChatTemplate
from aerie.common import cli
from aerie.common.files import read_json_lines, write_json
from aerie.common.progress import JobProgress
from aerie.engine.staging import Staging
from aerie.states.shard import Convention, Store, Teacher
from aerie.verifier.compatibility import resolve_layer_ids


def open_engine(
    args: argparse.Namespace,
    model_name: str | None,
    template: ChatTemplate,
    model: Path,
    layer_ids: list[int] | None,
    staging: Path | None,
    progress: JobProgress,
):
    """What answers: endpoints where the arguments name some, else an engine of this job."""
    from aerie.engine.endpoints import Endpoints
    from aerie.engine.in_process import Engine

    if args.endpoint:
        return Endpoints(
            args.endpoint,
            model_name,
            template,
            concurrency=args.endpoint_concurrency,
            max_model_len=args.max_length,
        )
    return Engine(
        model,
        args.engine,
        max_model_len=args.max_length,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
        capture_ids=layer_ids,
        staging=staging,
        progress=progress,
    )


def make_capture(
    args: argparse.Namespace,
    store: Store,
    model: Path,
    splits: dict[str, list[dict]],
    staging: Staging,
    progress: JobProgress,
):
    from aerie.generation.answers import Capture

    limits = {"max_length": args.max_length, "min_supervised_tokens": args.min_supervised_tokens}
    return Capture(
        store,
        Teacher(model),
        splits,
        args.capture["samples_per_shard"],
        limits,
        greedy=args.temperature == 0,
        staging_bytes=staging.limit,
        max_gib=args.max_gib,
        beat=progress.beat,
    )


def convention(capture: dict, verifier: dict, layer_ids: list[int]) -> Convention:
    return Convention(
        verifier["fingerprint"],
        tuple(layer_ids),
        verifier["hidden_size"],
        capture["format"],
        capture["last_state"],
        verifier["tokenizer"],
    )


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--train", type=Path, required=True, help="train.jsonl.zst")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl.zst")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--top-p", type=float, required=True)
    parser.add_argument("--max-tokens", type=int, required=True, help="an answer")
    parser.add_argument("--max-length", type=int, required=True, help="tokens a sample")
    parser.add_argument("--min-supervised-tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--capture",
        type=cli.json_argument,
        help="save hidden states too: JSON with layer_ids, samples_per_shard, format, last_state",
    )
    parser.add_argument("--max-gib", type=float, help="all hidden states in the store, GiB")
    parser.add_argument("--first-turn-only", action="store_true", help="answer no later turn")
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="URL",
        help="ask this OpenAI-compatible server (such as http://host:8000/v1) and start no engine;"
        " may be given several times; a key is read from AERIE_API_KEY",
    )
    parser.add_argument("--endpoint-model", help="its name there; none: the server's first")
    parser.add_argument("--endpoint-concurrency", type=int, default=32, help="requests at a time")
    parser.add_argument("--output", type=Path, required=True, help="manifest.json")
    cli.add_engine_arguments(parser)
    args = parser.parse_args()

    verifier = cli.read_fingerprint(args.verifier)
    # vLLM is imported below here: what can be wrong above must not cost its 10 seconds.
    from aerie.engine import endpoints as endpoint
    from aerie.generation import answers as responses

    model_name = None
    if args.endpoint:
        args.capture = None
        model_name = args.endpoint_model or endpoint.first_model(args.endpoint)
    splits = {
        "train": list(read_json_lines(args.train)),
        "heldout": list(read_json_lines(args.heldout)),
    }
    sampling = responses.Sampling(
        args.temperature,
        args.top_p,
        args.max_tokens,
        args.max_length,
        args.seed,
        args.first_turn_only,
        model_name,
    )
    key = sampling.key(verifier["fingerprint"])
    answers = responses.AnswerStore(args.store, key)
    wanted = [r["id"] for records in splits.values() for r in records]
    stored = answers.load(set(wanted))
    known = {i: row for i, row in stored.items() if not row.get("again")}
    missing = len(wanted) - len(known)
    start = time.monotonic()
    captured = {"shards": 0, "tokens": 0, "failed": []}
    load_seconds = 0.0
    adopted = 0
    if missing:
        model = Path(verifier["path"])
        template = ChatTemplate.load(model, args.trust_remote_code)
        capture, layer_ids = None, None
        try:
            with contextlib.ExitStack() as stack:
                # Endpoints answer when they will; `Endpoints` itself knows how long they may take.
                phase = "waiting" if args.endpoint else "loading"
                progress = stack.enter_context(
                    JobProgress("generate_responses", missing, "records", args.progress_log, phase)
                )
                staging = None
                if args.capture:
                    layer_ids = resolve_layer_ids(args.capture["layer_ids"], verifier["num_layers"])
                    store = Store(args.store, convention(args.capture, verifier, layer_ids))
                    # For two groups in the making, as long as can be, and one being written.
                    tokens = args.capture["samples_per_shard"] * args.max_length
                    largest = tokens * store.convention.bytes_per_token()
                    staging = stack.enter_context(Staging(3 * largest))
                    capture = make_capture(args, store, model, splits, staging, progress)
                folder = staging.folder if staging else None
                engine = stack.enter_context(
                    open_engine(args, model_name, template, model, layer_ids, folder, progress)
                )
                load_seconds = time.monotonic() - start
                told = set()

                def idle(words):
                    if words not in told:
                        told.add(words)
                        print(words, flush=True)
                    progress.beat()

                adopted = responses.generate(
                    engine,
                    splits,
                    template,
                    sampling,
                    answers,
                    known,
                    capture,
                    lambda done, tokens: progress.update(done, f"{tokens} tokens", tokens=tokens),
                    idle,
                )
        except endpoint.EndpointError as error:
            if not stored.keys() >= set(wanted):
                raise
            print(f"what an earlier run could not get stays as it is: {error}", file=sys.stderr)
            known = {**stored, **known}
        if capture:
            captured = {
                "shards": capture.shards,
                "tokens": capture.tokens,
                "failed": capture.failed,
            }
    write_json(
        args.output,
        {
            "key": key,
            "verifier": verifier["fingerprint"],
            "sampling": vars(sampling),
            **responses.describe(known, wanted),
            "reused": len(wanted) - missing + adopted,
            "generated": missing - adopted,
            "captured": captured,
            "load_seconds": round(load_seconds, 1),
            "seconds": round(time.monotonic() - start, 1),
        },
    )


if __name__ == "__main__":
    cli.run(main)
