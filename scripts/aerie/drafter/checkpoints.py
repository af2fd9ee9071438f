"""A training's checkpoints: folders `step-N`, whole or absent, of which the newest is kept.

`step-N/<epoch>/` is what speculators writes and resumes from, its position in the epoch included;
`step-N/order.json` is the order of the samples that the checkpoint was made with.
"""

import os
import shutil
from pathlib import Path

from aerie.common.files import sync_folder
from aerie.common.records import Record
from aerie.drafter.errors import TrainingFailed


class SampleOrder(Record):
    """`order.json` of a checkpoint: a training resumes only with the same order of samples."""

    steps: int
    """Training steps in all epochs."""
    ranks: int
    """Processes that share each step."""
    digest: str
    """Hash of the sequences of all epochs in order."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in `folder`, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def find_checkpoint(folder: Path, order: SampleOrder) -> Path | None:
    """The newest checkpoint; `TrainingFailed` when it was made with another order."""
    found = list_checkpoints(folder)
    if not found:
        return None
    before = SampleOrder.read(found[-1] / "order.json")
    if before != order:
        raise TrainingFailed(
            f"{found[-1]}: was made with the samples in another order ({before}) than this "
            f"environment gives ({order}); delete {folder} to train from the start"
        )
    return found[-1]


def start_checkpoint(folder: Path) -> Path:
    """An empty folder to write a checkpoint into."""
    temporary = working_folder(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def working_folder(folder: Path) -> Path:
    return folder / ".writing"


def finish_checkpoint(folder: Path, step: int, order: SampleOrder) -> None:
    """Sync what was written, give it its final name, and delete older checkpoints."""
    temporary = working_folder(folder)
    order.write(temporary / "order.json")
    for path in temporary.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_folder(path)
    final = folder / f"step-{step:09d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    sync_folder(folder)
    for old in list_checkpoints(folder)[:-1]:
        shutil.rmtree(old, ignore_errors=True)
