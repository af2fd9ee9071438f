#!/usr/bin/env python3
"""Padding of training sequences: speculators' packing and ours, of the same lengths.

python benchmarks/pack_samples.py [CONVERSATIONS.jsonl TOKENIZER_FOLDER]

CONVERSATIONS: ShareGPT lines (`conversations` of `from` and `value`). Without it: 10,000 random
lengths distributed like those of real conversations. Shards are groups of 64.
"""

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from common import record

ROLES = {"human": "user", "gpt": "assistant"}


def main() -> None:
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    from aerie.drafter.packing import pack_epoch, padding_share

    warnings.simplefilter("ignore")  # that long samples are truncated
    tokens = count_tokens(*map(Path, sys.argv[1:])) if len(sys.argv) == 3 else random_lengths()
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


def random_lengths() -> np.ndarray:
    """Median 190 tokens, 1 % above 800, int [10,000]."""
    drawn = np.random.default_rng(0).lognormal(5.25, 0.62, 10_000)
    return np.clip(drawn, 20, 4096).astype(int)


def count_tokens(conversations: Path, folder: Path) -> np.ndarray:
    """Length of each conversation as the folder's chat template renders it, int [N]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for line in conversations.read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["conversations"]
        messages = [{"role": ROLES.get(t["from"], t["from"]), "content": t["value"]} for t in turns]
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.array([len(ids) for ids in encoded])


if __name__ == "__main__":
    main()
