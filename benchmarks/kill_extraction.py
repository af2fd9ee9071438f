#!/usr/bin/env python3
"""Kill the extraction with SIGKILL at random moments and compare the resulting stores.

A tiny verifier (random weights, made here) and the real engine. A run is killed at a random moment
while it writes its next few shards, and the next run continues in its store. When a run finishes,
the store must equal an undisturbed one bit for bit, and a new store is begun, until `--kills` runs
were killed.

    python benchmarks/kill_extraction.py --kills 100
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, record
from extraction_inputs import extraction_settings

ENGINE = {
    "dtype": "auto",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.5,
    "cpu_cache_gib": 1,
}


def prepare(folder: Path, model: Path, samples: int) -> list[str]:
    """Write the inputs of a lane; the command that extracts it, without `--store`."""
    from aerie.samples.file import TokenizedSample, write_samples
    from aerie.samples.shards import ShardList, plan_shard
    from aerie.states.ids import group_records
    from aerie.verifier.fingerprint import describe_verifier

    chance = random.Random(0)
    rows = []
    for number in range(samples):
        ids = [chance.randrange(3, 400) for _ in range(chance.randrange(8, 120))]
        name = f"s{number}"
        rows.append(TokenizedSample(name, name, "kill", "train", ids, [True] * len(ids), 1, -1))
    groups = group_records([r.id for r in rows], 16)
    write_samples(folder / "samples", rows)
    shards = [plan_shard("train", [rows[i] for i in g]) for g in groups]
    ShardList(shards=shards).write(folder / "shards")
    describe_verifier(model, str(model)).write(folder / "verifier")
    command = [sys.executable, ROOT / "scripts" / "extract_hidden_states.py"]
    command += ["--samples", folder / "samples", "--shards", folder / "shards"]
    command += ["--verifier", folder / "verifier", "--lane", 0, "--settings"]
    command.append(extraction_settings(ENGINE, max_length=160, aux_layer_ids=[1, 2, 4]))
    return list(map(str, command))


def content(store: Path) -> dict[str, bytes]:
    """Files of the store that have their final name."""
    files = (p for p in store.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {str(p.relative_to(store)): p.read_bytes() for p in files}


def shards(store: Path) -> int:
    return sum(not p.name.startswith(".") for p in store.rglob("*.safetensors"))


def run(command: list[str], store: Path, kill: tuple[int, float] | None) -> bool:
    """Run a lane; whether it ended by itself.

    `kill`: (shards, seconds); kill the run this long after its engine works and the store has that
    many shards. None: do not kill it.
    """
    store.mkdir(exist_ok=True)
    log = store / ".progress"
    log.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*command, "--store", store, "--output", store / ".lane.json", "--progress-log", log],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )

    def at_work() -> bool:
        lines = log.read_text().splitlines() if log.is_file() else []
        return len(lines) > 1 and json.loads(lines[-1])["phase"] == "working"

    while kill and process.poll() is None:
        if at_work() and shards(store) >= kill[0]:
            time.sleep(kill[1])
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    errors = process.communicate()[1]
    if process.returncode not in (0, -signal.SIGKILL):
        sys.exit(errors.decode()[-4000:])
    return process.returncode == 0


def kill_and_compare(model: Path, kills: int, samples: int, seed: int) -> dict[str, int]:
    chance = random.Random(seed)
    counts = {"killed": 0, "stores": 0, "different": 0, "files": 0, "left_in_staging": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = prepare(folder, model, samples)
        start = time.time()
        assert run(command, folder / "whole", None)
        whole = content(folder / "whole")
        counts["files"] = len(whole)
        total = shards(folder / "whole")
        times = sorted(p.stat().st_mtime for p in (folder / "whole").rglob("*.safetensors"))
        assert times[0] > start
        gap = (times[-1] - times[0]) / (total - 1)
        while counts["killed"] < kills:
            store = folder / f"store-{counts['stores']}"
            counts["stores"] += 1
            while counts["killed"] < kills:
                there = shards(store)
                wanted = there + chance.randrange(5)
                if wanted >= total or run(command, store, (wanted, chance.uniform(0, 2 * gap))):
                    break
                counts["killed"] += 1
                print(f"\r{counts['killed']} kills", end="", file=sys.stderr)
            assert run(command, store, None)
            counts["different"] += content(store) != whole
        from aerie.engine.staging import MEMORY, PREFIX

        counts["left_in_staging"] = len(list(MEMORY.glob(f"{PREFIX}*")))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from support.models import make_verifier  # needs the packages of envs/dev.lock

    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "tiny"
        make_verifier(model)
        counts = kill_and_compare(model, args.kills, args.samples, args.seed)
    record("kill_extraction", [counts], samples=args.samples, engine=ENGINE)
    if counts["different"]:
        sys.exit("a store differs from the undisturbed one")


if __name__ == "__main__":
    main()
