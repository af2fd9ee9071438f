#!/usr/bin/env python3
"""Writing alone: states from memory, checked, packed and written, compared with upstream's path.

Upstream's path is what `speculators generate-offline-data --validate-outputs` and its connector do
with each sample, by their own functions: save, move, load, check. Both write into memory, so that
processors are compared and not disks. Rates are GB of bf16 states a second.

    python benchmarks/write_states.py
    python benchmarks/write_states.py results/store/hidden_states/*/*.safetensors
"""

import concurrent.futures
import shutil
import tempfile
import time
from pathlib import Path

import states
import torch
from common import record


def ours(folder: Path, samples: list, form: str) -> None:
    from aerie.states.store import Store

    Store(folder, states.convention(samples, form)).write("0" * 32, samples)


def upstream(folder: Path, samples: list, form: str) -> None:
    from safetensors.torch import load_file, save_file
    from speculators.data_generation.offline import check_hidden_states

    staging = folder / "staging"
    staging.mkdir()
    for number, sample in enumerate(samples):
        staged, final = staging / f"{number}.safetensors", folder / f"hs_{number}.safetensors"
        save_file({"hidden_states": sample.states, "token_ids": sample.tokens}, staged)
        shutil.move(staged, final)
        check_hidden_states(load_file(final), sample.tokens.tolist())


def measure(write, samples: list, form: str, threads: int, repeats: int) -> tuple[float, int]:
    """Seconds of the best of `repeats`, with each thread writing all samples; bytes that one thread
    writes."""
    best = float("inf")
    for _ in range(repeats + 1):  # the first one compiles
        with tempfile.TemporaryDirectory(dir=memory()) as name:
            folders = [Path(name, str(i)) for i in range(threads)]
            for folder in folders:
                folder.mkdir()
            start = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda f: write(f, samples, form), folders))
            best = min(best, time.perf_counter() - start)
            left = sum(p.stat().st_size for p in folders[0].rglob("*.safetensors"))
    return best, left


def memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def main() -> None:
    torch.set_num_threads(1)
    samples, repeats = states.from_arguments(__doc__)
    raw = sum(s.states.nbytes for s in samples)
    rows = []
    for name, write, form in (
        ("lossless", ours, "lossless"),
        ("raw", ours, "raw"),
        ("fp8", ours, "fp8"),
        ("upstream", upstream, ""),
    ):
        one, left = measure(write, samples, form, 1, repeats)
        two, _ = measure(write, samples, form, 2, repeats)
        rows.append(
            {
                "way": name,
                "share of bf16": left / raw,
                "GB/s, one thread": raw / one / 1e9,
                "GB/s, two": 2 * raw / two / 1e9,
                "two over one": 2 * one / two,
            }
        )
    width = samples[0].states.shape[2]
    record(f"write_states_{width}", rows, hidden_size=width, samples=len(samples), bytes=raw)


if __name__ == "__main__":
    main()
