"""The stage `train_drafter`: train a drafter once, keep it in the store, copy it into the run."""

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from aerie.common.errors import InputError
from aerie.common.files import digest, digest_file, sync_folder, write_bytes
from aerie.common.leases import POLL_SECONDS, Leases
from aerie.common.progress import JobProgress
from aerie.common.records import Record
from aerie.common.versions import TRAINING_VERSION
from aerie.config import Drafter
from aerie.drafter.errors import TrainingFailed
from aerie.drafter.metrics import MetricsLine, read_metrics
from aerie.drafter.packing import SplitPacking
from aerie.samples.file import TokenizedSample, read_samples
from aerie.states.manifest import LaneManifest
from aerie.verifier.fingerprint import Fingerprint, read_fingerprint


class TrainingDone(Record):
    """`drafters/<key>/done.json` in the store: the training is complete."""

    settings: dict[str, Any]
    """The drafter's section of the configuration."""
    packing: dict[str, SplitPacking]
    """By split, `train` and `heldout`."""
    wait_share: float
    """Mean over the training steps of the share spent waiting for data."""
    validation: MetricsLine
    """The last one."""


def train_drafter(
    drafter: Drafter,
    *,
    samples: Path,
    lanes: list[Path],
    vocabulary: Path | None,
    verifier: Path,
    trust_remote_code: bool,
    store: Path,
    model: Path,
    metrics: Path,
    progress_log: Path | None,
) -> None:
    """Train the drafter unless the store has it; write `model` (a folder) and `metrics`.

    `samples`: samples.parquet; `lanes`: the lanes' manifests; `vocabulary`: folder of `t2d` and
    `d2t`, None for the full vocabulary; `verifier`: fingerprint.json. On several GPUs every rank
    calls this; only the first writes.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("speculators", "aerie"):
        logging.getLogger(name).setLevel(logging.INFO)
    first_rank = os.environ.get("RANK", "0") == "0"
    fingerprint = read_fingerprint(verifier)
    manifests = [LaneManifest.read(path) for path in lanes]
    rows = read_samples(samples)
    key = drafter_key(
        drafter,
        fingerprint.fingerprint,
        manifests[0].convention.key,
        [(s.split, s.id, s.samples) for lane in manifests for s in lane.shards],
        samples,
        vocabulary,
    )
    folder = store / "drafters" / key
    folder.mkdir(parents=True, exist_ok=True)
    log = progress_log if first_rank else None
    with Leases() as leases, JobProgress("train_drafter", 0, "steps", log, "loading") as progress:
        if first_rank:
            take_training(folder, leases, progress)
        if not (folder / "done.json").is_file():
            maps = None
            if vocabulary:
                maps = (np.load(vocabulary / "t2d.npy"), np.load(vocabulary / "d2t.npy"))
            packing = _train(
                drafter,
                fingerprint,
                manifests,
                rows,
                maps,
                store,
                folder,
                leases,
                progress,
                trust_remote_code,
            )
            if first_rank:
                _finish(drafter, packing, folder)
    if first_rank:
        copy_folder(folder / "model", model)
        write_bytes(metrics, (folder / "metrics.jsonl").read_bytes())


def drafter_key(
    drafter: Drafter,
    fingerprint: str,
    convention: str,
    shards: list[tuple[str, str, list[str]]],
    samples: Path,
    vocabulary: Path | None,
) -> str:
    """Hash of everything that determines the drafter.

    `fingerprint`: the verifier's. `convention`: key of the hidden states. `shards`: split, id and
    samples of each.
    """
    relevant = drafter.model_dump(exclude={"gpus", "loader_workers"})
    # Each rank adds a sequence to a step; one GPU or none is one rank.
    relevant["ranks"] = max(1, drafter.gpus)
    maps = vocabulary and [digest_file(vocabulary / f"{n}.npy") for n in ("t2d", "d2t")]
    return digest(
        TRAINING_VERSION,
        fingerprint,
        convention,
        digest_file(samples),
        sorted(shards),
        maps,
        relevant,
    )


def take_training(folder: Path, leases: Leases, progress: JobProgress) -> None:
    """Wait until the training in `folder` is ours, or done by the job that had it.

    Raises `InputError` for a training on several GPUs: the other ranks would not wait as long.
    """
    told = None
    while not (folder / "done.json").is_file() and not leases.take(folder):
        who = leases.holder(folder) or told or "another process"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                f"{folder}: {who} is training this very drafter; wait for it to finish, then run "
                "again: the finished drafter is found there"
            )
        if who != told:
            told = who
            print(f"waiting for {folder}, which {who} is training", flush=True)
            progress.enter("waiting")
        progress.beat()
        time.sleep(POLL_SECONDS)
    progress.enter("loading")


def _train(
    drafter: Drafter,
    verifier: Fingerprint,
    manifests: list[LaneManifest],
    rows: dict[str, TokenizedSample],
    maps: tuple[np.ndarray, np.ndarray] | None,
    store: Path,
    folder: Path,
    leases: Leases,
    progress: JobProgress,
    trust_remote_code: bool,
) -> dict[str, SplitPacking]:
    # Imported here: a drafter that the store has needs no torch.
    from aerie.drafter.data import place_samples
    from aerie.drafter.trainer import run_training

    def before_writing() -> None:
        if leases.lost(folder):
            raise TrainingFailed(
                f"{folder}: {leases.holder(folder) or 'another process'} took this training over "
                "while this one was suspended; nothing was overwritten. Run again: it waits for "
                "the other one"
            )

    def on_step(line: MetricsLine) -> None:
        if not line.validation:
            note = f"loss {line.loss:.3f}"
            progress.update(line.step + 1, note, loss=line.loss, accuracy=line.accuracy)

    return run_training(
        drafter=drafter,
        verifier=verifier.folder,
        verifier_name=verifier.name,
        aux_layer_ids=manifests[0].convention.aux_layer_ids,
        maps=maps,
        samples=place_samples(rows, manifests, store),
        folder=folder,
        on_step=on_step,
        progress=progress,
        before_writing=before_writing,
        trust_remote_code=trust_remote_code,
    )


def _finish(drafter: Drafter, packing: dict[str, SplitPacking], folder: Path) -> None:
    """Mark the training as done."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    lines = read_metrics(folder / "metrics.jsonl")
    waits = [x.wait_share for x in lines if x.wait_share is not None]
    TrainingDone(
        settings=drafter.model_dump(),
        packing=packing,
        wait_share=sum(waits) / len(waits),
        validation=[x for x in lines if x.validation][-1],
    ).write(folder / "done.json")


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder so that `target` is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".copy-", dir=target.parent))
    shutil.copytree(source, temporary, dirs_exist_ok=True)
    temporary.chmod(0o755)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    sync_folder(target.parent)
