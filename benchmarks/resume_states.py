#!/usr/bin/env python3
"""What a second run, a bigger corpus and one edit cost: seconds, extracted tokens, shards touched.

`scripts/extract_hidden_states.py` on a store that already holds all samples (small states that were
made up, so that 5,000 of them are there in seconds): its own time, and whether an engine was
started. Then, without an engine, what a lane would extract after 1,000 samples grew to 1,400, and
how many shards one edited, removed or inserted sample in the middle touches.

    python benchmarks/resume_states.py --samples 5000
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import extraction_inputs as inputs
import numpy as np
from common import ROOT, record

WIDTH, LAYERS, VOCABULARY = 64, 8, 1000


def made_up(number: int, seed: int = 0):
    """Samples of 20 to 400 tokens."""
    from aerie.common.files import digest
    from aerie.samples.file import TokenizedSample

    rows = []
    for i in range(number):
        random = np.random.default_rng([seed, i])
        ids = random.integers(3, VOCABULARY, int(random.integers(20, 400))).tolist()
        name = digest(ids)
        rows.append(
            TokenizedSample(name, name, "benchmark", "train", ids, [True] * len(ids), 1, -1)
        )
    return rows


def fill_store(store, rows, shards) -> None:
    import torch

    from aerie.states.shard import Sample
    from aerie.states.store import write_shard

    by_id = {r.id: r for r in rows}
    for shard in shards:
        samples = []
        for identity in shard.samples:
            tokens = torch.tensor(by_id[identity].input_ids)
            states = torch.randn(len(tokens), len(store.convention.layer_ids), WIDTH)
            samples.append(Sample(identity, tokens, states.to(torch.bfloat16)))
        write_shard(store, shard.id, samples, {})


def resume(folder: Path, rows, store, shards) -> dict:
    from aerie.common.files import write_json
    from aerie.samples.file import write_samples

    samples, listed, fingerprint = (folder / n for n in ("s.parquet", "s.json", "f.json"))
    write_samples(samples, rows)
    write_json(listed, {"shards": shards})
    write_json(
        fingerprint,
        {
            "path": str(folder),
            "fingerprint": store.convention.fingerprint,
            "num_layers": LAYERS,
            "hidden_size": WIDTH,
            "tokenizer": "",
        },
    )
    output = folder / "lane-0.json"
    command = [sys.executable, str(ROOT / "scripts" / "extract_hidden_states.py")]
    command += ["--samples", samples, "--shards", listed, "--verifier", fingerprint]
    command += ["--store", folder, "--lane", "0", "--output", output]
    command += ["--settings", inputs.extraction_settings(inputs.ENGINE, max_length=512)]
    start = time.monotonic()
    subprocess.run(list(map(str, command)), check=True)
    whole = time.monotonic() - start
    manifest = json.loads(output.read_text())
    start = time.monotonic()
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import aerie.extraction.run",
        ],
        check=True,
        env={"PYTHONPATH": str(ROOT / "scripts")},
    )
    imports = time.monotonic() - start
    return {
        "what": f"resume with all {len(rows)} samples",
        "seconds": whole - imports,
        "with_imports": whole,
        "extracted_tokens": manifest["extracted_tokens"],
        "shards": len(shards),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=5000)
    args = parser.parse_args()
    from aerie.extraction.work import LaneWork
    from aerie.states.convention import Convention
    from aerie.states.store import Store
    from aerie.verifier.compatibility import resolve_layer_ids

    ids = tuple(resolve_layer_ids(None, LAYERS))
    rows = made_up(args.samples)
    shards = inputs.shards(rows)
    table = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Store(folder, Convention("f" * 32, ids, WIDTH))
        fill_store(store, rows, shards)
        table.append(resume(folder, rows, store, shards))
    known = {s.id for s in shards}
    middle = len(rows) // 2
    new = made_up(1, seed=1)[0]
    edits = {
        "edited": [*rows[:middle], new, *rows[middle + 1 :]],
        "removed": [*rows[:middle], *rows[middle + 1 :]],
        "inserted": [*rows[:middle], new, *rows[middle:]],
    }
    for what, changed in edits.items():
        touched = [s for s in inputs.shards(changed) if s.id not in known]
        table.append({"what": f"one sample {what} in the middle", "shards": len(touched)})
    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name), Convention("f" * 32, ids, WIDTH))
        first, more = rows[:1000], rows[:1400]
        fill_store(store, first, inputs.shards(first))
        work = LaneWork(store, {r.id: r for r in more}, inputs.shards(more))
        there = {r.id for r in first}
        again = [r for s in work.missing for r in work.to_extract(s) if r.id in there]
        table.append(
            {
                "what": f"{len(first)} to {len(more)} samples: tokens that were there already",
                "extracted_tokens": sum(len(r.input_ids) for r in again),
                "shards": len(work.missing),
            }
        )
    record("resume_states", table, samples=len(rows))


if __name__ == "__main__":
    main()
