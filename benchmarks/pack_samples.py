#!/usr/bin/env python3
"""Padding of training sequences: speculators' packing and ours, of the same lengths.

Lengths are those of ShareGPT conversations as the verifier's chat template renders them. Shards
are groups of 64.

    python benchmarks/pack_samples.py
"""

import time
import warnings
from pathlib import Path

import extraction_inputs as inputs
import numpy as np
from common import record


def main() -> None:
    args = inputs.parser(__doc__.splitlines()[0], None).parse_args()
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    from aerie.drafter.packing import pack_epoch, padding_share

    warnings.simplefilter("ignore")  # that long samples are truncated
    folder = Path(inputs.verifier(args.source)["path"])
    tokens = count_tokens(args.conversations, folder, args.samples)
    rows = []
    for capacity in (1024, 2048):
        lengths = np.minimum(tokens - 1, capacity)
        for ranks in (1, 8):
            start = time.perf_counter()
            theirs = []
            for rank in range(ranks):
                sampler = MultipackDistributedBatchSamplerV2(capacity, lengths, ranks, rank)
                theirs += list(sampler)
            middle = time.perf_counter()
            shards = np.arange(len(lengths)) // 64
            ours = pack_epoch(lengths, shards, capacity, np.random.default_rng(0), ranks)
            end = time.perf_counter()
            for name, packed, seconds in (
                ("speculators", theirs, middle - start),
                ("aerie", ours, end - middle),
            ):
                rows.append(
                    {
                        "sequence_length": capacity,
                        "ranks": ranks,
                        "packing": name,
                        "sequences": len(packed),
                        "padding": padding_share(lengths, packed, capacity),
                        "left out": len(lengths) - sum(len(s) for s in packed),
                        "seconds": seconds,
                    }
                )
    record("pack_samples", rows, samples=len(tokens), longer_than_1024=int((tokens > 1025).sum()))


def count_tokens(conversations: Path, folder: Path, limit: int | None) -> np.ndarray:
    """Length of each conversation as the folder's chat template renders it, int [N]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(messages, tokenize=False)
        for messages in inputs.records(conversations)[:limit]
    ]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.array([len(ids) for ids in encoded])


if __name__ == "__main__":
    main()
