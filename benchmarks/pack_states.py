#!/usr/bin/env python3
"""Size and speed of lossless packing against zstandard on the plain bytes, on stored shards.

python benchmarks/pack_states.py results/store/hidden_states/*/*.safetensors
"""

import sys
import time
from pathlib import Path

import zstandard

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def main() -> None:
    sys.path.insert(0, str(SCRIPTS))
    from aerie.hidden_states import Shard, pack, unpack

    raw = packed = plain = 0
    seconds = {"pack": 0.0, "unpack": 0.0, "zstd 3": 0.0}
    for name in sys.argv[1:]:
        with Shard(Path(name)) as shard:
            for number in range(len(shard.samples)):
                states = shard.read(number).states
                start = time.perf_counter()
                planes = pack(states)
                seconds["pack"] += time.perf_counter() - start
                start = time.perf_counter()
                unpack(*planes, tuple(states.shape))
                seconds["unpack"] += time.perf_counter() - start
                data = bytes_of(states)
                start = time.perf_counter()
                plain += len(zstandard.ZstdCompressor(level=3).compress(data))
                seconds["zstd 3"] += time.perf_counter() - start
                raw += len(data)
                packed += sum(len(p) for p in planes)
    if not raw:
        sys.exit("name at least one shard: results/store/hidden_states/*/*.safetensors")
    print(f"bf16 bytes {raw:,}; byte planes {packed / raw:.3f}; zstd 3 {plain / raw:.3f}")
    print(", ".join(f"{k} {raw / s / 1e6:.0f} MB/s" for k, s in seconds.items()), "on one core")


def bytes_of(states) -> bytes:
    import torch

    return states.contiguous().view(torch.uint16).numpy().tobytes()


if __name__ == "__main__":
    main()
