#!/usr/bin/env python3
"""How long a training step waits for its data, by how the samples are read ahead.

python benchmarks/load_samples.py [results/demo] [STEPS]

Trains on the states of a finished run, a few steps per way, each in a process of its own: read when
the step asks for it, read ahead by a thread (`loader_workers: 0`), or by one worker process.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, record

WAYS = {"when asked": -1, "a thread": 0, "one process": 1}


def main() -> None:
    run = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "results" / "demo")
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    rows = []
    for name, workers in WAYS.items():
        command = [sys.executable, __file__, "--measure", str(run), str(steps), str(workers)]
        print(f"reading {name} …", file=sys.stderr)
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        lines = json.loads(output.rsplit("METRICS", 1)[1])
        # The first step of an epoch waits for the reading to start, workers for their imports.
        waited = [x["wait_share"] for x in lines[1:]]
        speeds = [x["tokens_per_second"] for x in lines[1:]]
        rows.append(
            {
                "read": name,
                "steps": len(lines),
                "wait_share": sum(waited) / len(waited),
                "first step's": lines[0]["wait_share"],
                "tokens/s": sorted(speeds)[len(speeds) // 2],
            }
        )
        print(rows[-1], file=sys.stderr)
    record("load_samples", rows, run=run.name)


def measure(run: Path, steps: int, workers: int) -> None:
    import numpy as np
    from torch.utils.data import DataLoader

    from aerie.common.progress import JobProgress
    from aerie.config import Drafter
    from aerie.drafter.data import ShardLoader, place_samples
    from aerie.drafter.trainer import run_training
    from aerie.samples.file import read_samples
    from aerie.states.manifest import LaneManifest
    from aerie.verifier.fingerprint import read_fingerprint

    if workers < 0:
        ShardLoader.__iter__ = DataLoader.__iter__
    drafter = Drafter(ttt_steps=2, sequence_length=1024, epochs=1, loader_workers=max(0, workers))
    rows = read_samples(run / "samples/samples.parquet")
    lane = LaneManifest.read(run / "hidden_states/lane-0.json")
    wanted = {"train": steps * 1024, "heldout": 1024}
    samples = {}
    for split, placed in place_samples(rows, [lane], run.parent / "store").items():
        ends = np.cumsum([len(p.sample.input_ids) for p in placed])
        samples[split] = placed[: int(np.searchsorted(ends, wanted[split])) + 1]
    maps = next((run / "vocabulary").iterdir())
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        run_training(
            drafter=drafter,
            verifier=read_fingerprint(run / "verifier/fingerprint.json").folder,
            verifier_name="verifier",
            aux_layer_ids=lane.convention.aux_layer_ids,
            maps=(np.load(maps / "t2d.npy"), np.load(maps / "d2t.npy")),
            samples=samples,
            folder=Path(folder),
            on_step=lines.append,
            progress=JobProgress("train_drafter", 0, "steps"),
        )
    print("METRICS", json.dumps([x.as_json() for x in lines if not x.validation]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
