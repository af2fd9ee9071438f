#!/usr/bin/env python3
"""Size and speed of lossless packing and of alternatives, on one core.

"exponents" is the exponent plane alone, as a share of that plane. GB/s count the input.

    python benchmarks/pack_states.py
    python benchmarks/pack_states.py results/store/hidden_states/*/*.safetensors
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import states
import torch
import zstandard
from common import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", nargs="*", type=Path, help="default: a stand-in, 7,168 wide")
    arguments = parser.parse_args()
    if arguments.shards:
        samples = states.stored(arguments.shards, 150_000_000)
    else:
        samples = states.stand_in(4, 512)

    from aerie.states.codec import ZSTD, exponent_base, pack, rows_by_layer

    bits = [s.states.contiguous().view(torch.uint16).numpy() for s in samples]
    stored = [rows_by_layer(len(b), b.shape[1], None) for b in bits]
    base, means = exponent_base(list(zip(bits, stored, strict=True)))
    exponents = [(b >> 7).astype(np.uint8) for b in bits]
    centred = [e - base for e in exponents]
    by_channel = [np.ascontiguousarray(e.reshape(len(e), -1).T) for e in centred]
    rest = [((b >> 8) & 0x80 | b & 0x7F).astype(np.uint8) for b in bits]
    low = [np.packbits((b & 1).astype(np.uint8)) for b in bits]

    def zstd(parameters: int | zstandard.ZstdCompressionParameters) -> Callable:
        if isinstance(parameters, int):
            packer = zstandard.ZstdCompressor(level=parameters)
        else:
            packer = zstandard.ZstdCompressor(compression_params=parameters)
        return lambda data: len(packer.compress(data))

    def ours(pair: tuple) -> int:
        return sum(memoryview(part).nbytes for part in pack(*pair, base, means))

    rows = []
    for name, data, way in (
        ("bf16, level 1", bits, zstd(1)),
        ("bf16, level 3", bits, zstd(3)),
        ("exponents, level 1", exponents, zstd(1)),
        ("exponents, Huffman", exponents, zstd(ZSTD)),
        ("less the median, level 1", centred, zstd(1)),
        ("less the median, level -1", centred, zstd(-1)),
        ("less the median, Huffman", centred, zstd(ZSTD)),
        ("the same by channel", by_channel, zstd(ZSTD)),
        ("sign and mantissa, Huffman", rest, zstd(ZSTD)),
        ("lowest bits, Huffman", low, zstd(ZSTD)),
        ("bf16, all together", list(zip(bits, stored, strict=True)), ours),
    ):
        put_in = sum(d[0].nbytes if isinstance(d, tuple) else d.nbytes for d in data)
        way(data[0])
        start = time.perf_counter()
        left = sum(way(d) for d in data)
        seconds = time.perf_counter() - start
        rows.append({"way": name, "share": left / put_in, "GB/s": put_in / seconds / 1e9})
    width = bits[0].shape[2]
    record(f"pack_states_{width}", rows, hidden_size=width, tokens=sum(map(len, bits)))


if __name__ == "__main__":
    main()
