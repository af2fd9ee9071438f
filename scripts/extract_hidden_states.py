#!/usr/bin/env python3
"""One lane: extract the hidden states of its share of the samples into shards."""

import contextlib
import time
from pathlib import Path

from aerie.common import cli
from aerie.common.files import read_json, write_json
from aerie.common.progress import JobProgress
from aerie.engine.staging import Staging
from aerie.extraction.lane import LaneWork, check_room, describe_lane, fill, is_done, share
from aerie.samples.tokenize import read_samples
from aerie.states.shard import Convention, Store, Teacher
from aerie.verifier.compatibility import resolve_layer_ids


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet")
    parser.add_argument("--shards", type=Path, required=True, help="shards.json")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--layer-ids", type=cli.json_argument, required=True, help="JSON, or null")
    parser.add_argument("--format", required=True)
    parser.add_argument("--last-state", required=True, help="all or supervised")
    parser.add_argument("--lane", type=int, required=True)
    parser.add_argument("--lanes", type=int, required=True)
    parser.add_argument("--max-length", type=int, required=True, help="tokens a sample")
    parser.add_argument("--min-kept-share", type=float, required=True)
    parser.add_argument("--max-gib", type=float, help="all hidden states in the store, GiB")
    parser.add_argument("--output", type=Path, required=True, help="the lane's manifest")
    cli.add_engine_arguments(parser)
    args = parser.parse_args()

    verifier = cli.read_fingerprint(args.verifier)
    model = Path(verifier["path"])
    layer_ids = resolve_layer_ids(args.layer_ids, verifier["num_layers"])
    store = Store(
        args.store,
        Convention(
            verifier["fingerprint"],
            tuple(layer_ids),
            verifier["hidden_size"],
            args.format,
            args.last_state,
            verifier["tokenizer"],
        ),
    )
    everything = read_json(args.shards)["shards"]
    shards = share(everything, args.lane, args.lanes)
    work = LaneWork(store, read_samples(args.samples), shards)
    todo = work.to_extract()
    # Lanes side by side fill the same disk: what all of them lack has to fit.
    lacking = sum(s["tokens"] for s in everything if not is_done(store, s["id"]))
    check_room(store, lacking, args.max_gib)
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            JobProgress("extract_hidden_states", len(todo), "samples", args.progress_log)
        )
        staging = stack.enter_context(Staging(work.staging_bytes())) if todo else None

        def start_engine():
            from aerie.engine.in_process import Engine

            return Engine(
                model,
                args.engine,
                max_model_len=args.max_length + 1,
                trust_remote_code=args.trust_remote_code,
                capture_ids=layer_ids,
                staging=staging.folder,
                progress=bar,
            )

        counts = fill(
            work,
            start_engine,
            lambda: Teacher(model),
            lambda samples, tokens: bar.update(samples, f"{tokens} tokens", tokens=tokens),
            staging_bytes=staging.limit if staging else 0,
            min_kept_share=args.min_kept_share,
            beat=bar.beat,
            enter=bar.enter,
        )
        counts["seconds"] = round(time.monotonic() - start, 1)
        bar.enter("finishing")
        lane = describe_lane(work, counts, args.min_kept_share, bar.beat)
    write_json(args.output, lane)


if __name__ == "__main__":
    cli.run(main)
