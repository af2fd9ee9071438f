"""Hidden states for benchmarks: from stored shards, or a stand-in for a wide verifier."""

import argparse
from pathlib import Path

import torch


def from_arguments(text: str) -> tuple[list, int]:
    """Samples and repeats from the command line; `text` is the program's help."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("shards", nargs="*", type=Path, help="default: a stand-in, 7,168 wide")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    samples = stored(arguments.shards) if arguments.shards else stand_in(8, 512)
    return samples, arguments.repeats


def stored(paths: list[Path], limit: int = 400_000_000) -> list:
    """Samples of these shards, up to `limit` bytes of states."""
    from aerie.states.shard import Shard

    samples, size = [], 0
    for path in paths:
        with Shard(path) as shard:
            for number in range(len(shard.samples)):
                samples.append(shard.read(number))
                size += samples[-1].states.nbytes
                if size >= limit:
                    return samples
    return samples


def stand_in(count: int, length: int, width: int = 7168) -> list:
    """Random states of four layers that resemble a residual stream, though no particular model's.

    Each channel has its own mean and (log-normal) spread, and the first position is thirty times
    as large. Between two kept layers there are eight additions in bf16, so sums are rounded as a
    verifier rounds them.
    """
    from aerie.states.shard import Sample

    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    mean, spread = normal(width) * 0.3, torch.exp(0.5 * normal(width))
    samples = []
    for number in range(count):
        tokens = torch.randint(0, 100_000, (length,), generator=generator)
        state = (0.1 * spread * normal(length, width)).to(torch.bfloat16)
        kept = []
        for step in range(32):
            added = 0.1 * (1 + step / 8) * (spread * normal(length, width) + mean)
            added[0] *= 30
            state = state + added.to(torch.bfloat16)
            if step % 8 == 7:
                kept.append(state)
        samples.append(Sample(str(number), tokens, torch.stack(kept, 1)))
    return samples


def convention(samples: list, form: str = "lossless"):
    from aerie.states.convention import Convention

    _, layers, width = samples[0].states.shape
    return Convention("0" * 32, tuple(range(1, layers + 1)), width, form)
