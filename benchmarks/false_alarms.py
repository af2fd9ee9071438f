#!/usr/bin/env python3
"""Undisturbed runs with busy processes beside them: how often is an alarm raised for nothing?

A tiny verifier (random weights, made here), the real engine and the real training, the whole
workflow each time in a folder of its own, with the limits that the configuration has by default.
Alarms are jobs that the supervisor stopped, jobs that failed, its warnings (a loss that jumps or
grows), and messages that the triage takes for `degraded` or `fatal`.

    python benchmarks/false_alarms.py --runs 10 --busy 2
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, record

NOUNS = "apples boats letters trains friends lakes roads plans answers reasons children"
CONFIG = {
    "run": "one",
    "verifier": {"source": "verifier"},
    "corpus": {"sources": ["prompts.jsonl"], "heldout_share": 0.1},
    "generation": {"max_tokens": 24},
    "samples": {"max_length": 128, "min_supervised_tokens": 4},
    "hidden_states": {"aux_layer_ids": [1, 2, 4], "samples_per_shard": 16},
    "engine": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.5,
        "cpu_cache_gib": 1,
    },
    "drafters": {"base": {"vocabulary": 256, "epochs": 2, "sequence_length": 128}},
    "evaluation": {"max_prompts": 6, "max_tokens": 16, "speed_prompts": 2},
}


def prepare(folder: Path) -> Path:
    """A copy of the workflow with its inputs."""
    from support.models import make_verifier  # needs the packages of envs/dev.lock

    for name in ("Snakefile", "rules", "scripts", "profiles", "envs", "report", "config"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, folder / name)
    make_verifier(folder / "verifier")
    nouns = NOUNS.split()
    prompts = (
        {"prompt": f"write {i} words about {nouns[i % 11]} and {nouns[i * i % 7]}"}
        for i in range(120)
    )
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    # JSON is YAML.
    (folder / "config/config.yaml").write_text(json.dumps(CONFIG))
    return folder


def one_run(folder: Path) -> dict[str, object]:
    """Run it from nothing; the alarms by kind."""
    from aerie.watching.run_status import BROKEN
    from aerie.watching.status import gather

    shutil.rmtree(folder / "results", ignore_errors=True)
    start = time.monotonic()
    # One attempt: a second would hide what stopped the first.
    command = [sys.executable, "-m", "snakemake", "--cores", "all", "--retries", "0"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "AERIE_UNCHECKED": "1"}, capture_output=True
    )
    status = gather(folder / "results/one")
    counts = status.warnings()
    row: dict[str, object] = {
        "seconds": time.monotonic() - start,
        "exit": done.returncode,
        "stalled": sum(j.state == "stalled" for j in status.jobs),
        "other failures": sum(j.state in BROKEN and j.state != "stalled" for j in status.jobs),
        "loss warnings": sum(n for kind, n in counts.items() if kind.startswith("loss ")),
        "degraded or fatal": counts.get("degraded", 0) + counts.get("fatal", 0),
    }
    for job in status.jobs:
        for words in (job.reason, *job.alerts):
            if words:
                print(f"{job.name}: {words}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=2, help="busy processes beside them")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the busy ones end too
    endless = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(endless) for _ in range(args.busy)]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = prepare(Path(name))
            rows = []
            for number in range(args.runs):
                rows.append({"run": number + 1, **one_run(folder)})
                print(rows[-1], flush=True)
    finally:
        for process in busy:
            process.kill()
    record("false_alarms", rows, busy_processes=args.busy)


if __name__ == "__main__":
    main()
