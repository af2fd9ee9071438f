#!/usr/bin/env python3
"""One lane: extract the hidden states of its share of the samples into shards."""

import time
from pathlib import Path

from aerie import cli
from aerie.extraction import LaneWork, describe_lane, fill, share
from aerie.files import read_json, write_json
from aerie.hidden_states import Convention, Store, Teacher
from aerie.progress import JobProgress
from aerie.samples import read_samples
from aerie.verifier import resolve_layer_ids


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
    shards = share(read_json(args.shards)["shards"], args.lane, args.lanes)
    work = LaneWork(store, read_samples(args.samples), shards)
    todo = work.to_extract()
    start = time.monotonic()

    def start_engine():
        from aerie.engine import Engine

        return Engine(
            model,
            args.engine,
            max_model_len=args.max_length + 1,
            trust_remote_code=args.trust_remote_code,
            capture_ids=layer_ids,
        )

    with JobProgress("extract_hidden_states", len(todo), "samples", args.progress_log) as bar:
        counts = fill(
            work,
            start_engine,
            lambda: Teacher(model),
            lambda samples, tokens: bar.update(samples, f"{tokens} tokens", tokens=tokens),
        )
    counts["seconds"] = round(time.monotonic() - start, 1)
    write_json(args.output, describe_lane(store, shards, counts, args.min_kept_share))


if __name__ == "__main__":
    cli.run(main)
