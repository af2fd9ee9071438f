#!/usr/bin/env python3
"""Decoding to tensors on one core from the page cache, compared with upstream and a plain copy.

python benchmarks/read_states.py
python benchmarks/read_states.py results/store/hidden_states/*/*.safetensors
"""

import tempfile
import time
from pathlib import Path

import states
import torch
from common import record
from write_states import memory, ours, upstream


def main() -> None:
    torch.set_num_threads(1)
    samples, repeats = states.from_arguments(__doc__)
    raw = sum(s.states.nbytes for s in samples)

    from safetensors.torch import load_file

    from aerie.states.shard import Shard

    def read_shard(folder: Path) -> None:
        with Shard(next(folder.rglob("*.safetensors"))) as shard:
            for number in range(len(shard.samples)):
                shard.read(number)

    def load(folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            load_file(path)

    def load_and_copy(folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            load_file(path)["hidden_states"].clone()

    def copy(folder: Path) -> None:
        for sample in samples:
            sample.states.clone()

    rows = []
    for name, write, form, read in (
        ("lossless", ours, "lossless", read_shard),
        ("raw", ours, "raw", read_shard),
        ("fp8", ours, "fp8", read_shard),
        ("upstream, load_file", upstream, "", load),
        ("upstream, load_file and copy", upstream, "", load_and_copy),
        ("memory copy", upstream, "", copy),
    ):
        best = float("inf")
        with tempfile.TemporaryDirectory(dir=memory()) as folder:
            write(Path(folder), samples, form)
            for _ in range(repeats + 1):
                start = time.perf_counter()
                read(Path(folder))
                best = min(best, time.perf_counter() - start)
        rows.append({"way": name, "GB/s": raw / best / 1e9})
    width = samples[0].states.shape[2]
    record(f"read_states_{width}", rows, hidden_size=width, samples=len(samples), bytes=raw)


if __name__ == "__main__":
    main()
