#!/usr/bin/env python3
"""Train one drafter on the extracted hidden states; go on from its last checkpoint."""

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.files import digest, digest_file, read_json, sync_folder, write_bytes, write_json
from aerie.common.leases import POLL_SECONDS, Leases
from aerie.common.progress import JobProgress
from aerie.common.versions import TRAINING_VERSION
from aerie.samples.file import read_samples


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet")
    parser.add_argument("--lanes", type=Path, required=True, nargs="+", help="lanes' manifests")
    parser.add_argument("--vocabulary", type=Path, help="folder of t2d and d2t; absent: full")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--settings", type=cli.json_argument, required=True, help="the drafter")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--progress-log", type=Path, help="file for progress as JSON lines")
    parser.add_argument("--model", type=Path, required=True, help="folder, written")
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl, written")
    args = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("speculators", "aerie"):
        logging.getLogger(name).setLevel(logging.INFO)

    verifier = cli.read_fingerprint(args.verifier)
    lanes = [read_json(path) for path in args.lanes]
    rows = read_samples(args.samples)
    folder = args.store / "drafters" / _key(args, verifier, lanes)
    folder.mkdir(parents=True, exist_ok=True)
    log = args.progress_log if os.environ.get("RANK", "0") == "0" else None
    with Leases() as leases, JobProgress("train_drafter", 0, "steps", log, "loading") as bar:
        if os.environ.get("RANK", "0") == "0":
            _take(folder, leases, bar)
        if not (folder / "done.json").is_file():
            _train(args, verifier, lanes, rows, folder, leases, bar)
    if os.environ.get("RANK", "0") == "0":
        copy_folder(folder / "model", args.model)
        write_bytes(args.metrics, (folder / "metrics.jsonl").read_bytes())


def _key(args, verifier, lanes) -> str:
    """Hash of everything that determines the drafter."""

    relevant = {k: v for k, v in args.settings.items() if k not in ("gpus", "loader_workers")}
    # Each rank adds a sequence to a step; one GPU or none is one rank.
    relevant["ranks"] = max(1, args.settings["gpus"])
    maps = args.vocabulary and [digest_file(args.vocabulary / f"{n}.npy") for n in ("t2d", "d2t")]
    shards = sorted((s["split"], s["id"], s["samples"]) for x in lanes for s in x["shards"])
    return digest(
        TRAINING_VERSION,
        verifier["fingerprint"],
        lanes[0]["convention"]["key"],
        digest_file(args.samples),
        shards,
        maps,
        relevant,
    )


def _take(folder: Path, leases: Leases, bar: JobProgress) -> None:
    """Have the training in `folder` to ourselves, or find it done by who had it.

    Raises `InputError` for a training on several GPUs: the other ranks would not wait as long.
    """
    told = None
    while not (folder / "done.json").is_file() and not leases.take(folder):
        who = leases.holder(folder) or told or "another process"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                f"{folder}: {who} trains this very drafter now; wait until it has, then run again: "
                "the drafter is found there"
            )
        if who != told:
            told = who
            print(f"waits for {folder}, which {who} trains now", flush=True)
            bar.enter("waiting")
        bar.beat()
        time.sleep(POLL_SECONDS)
    bar.enter("loading")


def _train(args, verifier, lanes, rows, folder: Path, leases: Leases, bar: JobProgress) -> None:
    from aerie.drafter.trainer import TrainingFailed, place_samples, read_metrics, run_training

    maps = None
    if args.vocabulary:
        maps = tuple(np.load(args.vocabulary / f"{n}.npy") for n in ("t2d", "d2t"))

    def before_writing():
        if leases.lost(folder):
            raise TrainingFailed(
                f"{folder}: {leases.holder(folder) or 'another process'} took this training over "
                "while this one did not run; nothing was written over. Run again: it waits for it"
            )

    def on_step(line):
        if not line.get("validation"):
            note = f"loss {line['loss']:.3f}"
            bar.update(line["step"] + 1, note, loss=line["loss"], accuracy=line["accuracy"])

    packing = run_training(
        settings=args.settings,
        verifier=Path(verifier["path"]),
        verifier_name=_name(verifier),
        layer_ids=lanes[0]["convention"]["layer_ids"][:-1],
        maps=maps,
        samples=place_samples(rows, lanes, args.store),
        folder=folder,
        on_step=on_step,
        progress=bar,
        before_writing=before_writing,
        trust_remote_code=args.trust_remote_code,
    )
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        lines = read_metrics(folder / "metrics.jsonl")
        waits = [x["wait_share"] for x in lines if not x.get("validation")]
        done = {
            "settings": args.settings,
            "packing": packing,
            "wait_share": sum(waits) / len(waits),
            "validation": [x for x in lines if x.get("validation")][-1],
        }
        write_json(folder / "done.json", done)


def _name(verifier) -> str:
    """The verifier's Hugging Face id, or the name of its folder."""
    source = verifier["source"]
    is_id = not source.startswith("package:") and not Path(source).is_dir()
    return source if is_id else Path(verifier["path"]).name


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder so that `target` is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".copy-", dir=target.parent))
    shutil.copytree(source, temporary, dirs_exist_ok=True)
    temporary.chmod(0o755)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    sync_folder(target.parent)


if __name__ == "__main__":
    cli.run(main)
