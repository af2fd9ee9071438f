"""Training a drafter with speculators' own model and trainer, fed from our shards."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.model import SpeculatorModel
from speculators.train.cli import build_draft_model
from speculators.train.distributed import maybe_destroy_distributed
from speculators.train.trainer import Trainer, TrainerConfig

from aerie.common.files import sync_folder
from aerie.common.progress import JobProgress
from aerie.config import Drafter
from aerie.drafter.checkpoints import (
    SampleOrder,
    find_checkpoint,
    finish_checkpoint,
    start_checkpoint,
    working_folder,
)
from aerie.drafter.data import PlacedSample, ShardLoader, describe_order, make_loader
from aerie.drafter.errors import TrainingFailed
from aerie.drafter.metrics import MetricsLine, read_metrics
from aerie.drafter.packing import SplitPacking
from aerie.drafter.recorder import Recorder
from aerie.drafter.setup import Arguments, prepare, speculators_arguments
from aerie.verifier.checkpoint import text_config


class ShardTrainer(Trainer):
    """speculators' trainer with whole checkpoints (`aerie.drafter.checkpoints`), also on a CPU.

    No random number is drawn after the weights are made, and the order of an epoch comes from the
    seed and the epoch alone, so a checkpoint needs no random state. `progress` is told of the
    phases; `before_writing` is called before each checkpoint and may raise.
    """

    def __init__(
        self,
        *args: Any,
        checkpoints: Path,
        order: SampleOrder,
        progress: JobProgress,
        before_writing: Callable[[], None],
        **kwargs: Any,
    ):
        self.checkpoints = checkpoints
        self.order = order
        self.progress = progress
        self.before_writing = before_writing
        super().__init__(*args, **kwargs)

    def setup_trainer(self) -> None:
        if not torch.cuda.is_available():
            self.device_type = "cpu"
            self.local_rank = torch.device("cpu")
        super().setup_trainer()

    def train_epoch(self, epoch: int, **kwargs: Any) -> None:
        self.progress.enter("working")
        super().train_epoch(epoch, **kwargs)

    def val_epoch(self, epoch: int) -> dict[str, float] | None:
        self.progress.enter("validating")
        return super().val_epoch(epoch)

    def _maybe_val_sync(self, batch_index: int) -> None:
        # speculators calls it for every batch of a validation.
        self.progress.beat()
        super()._maybe_val_sync(batch_index)

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        # speculators saves the end of an epoch before validating it; a kill between the two would
        # lose the validation. So that one is saved in `maybe_update_best`.
        if local_step > 0:
            self._save(epoch, local_step)

    def maybe_update_best(self, epoch: int, val_metrics: dict[str, float] | None) -> None:
        self._save(epoch, 0)

    def _save(self, epoch: int | str, local_step: int) -> None:
        phase = self.progress.phase
        self.before_writing()
        self.progress.enter("saving")
        if self.rank == 0:
            start_checkpoint(self.checkpoints)
        self.checkpointer.path = working_folder(self.checkpoints)
        self.checkpointer.save_checkpoint(
            self.model, self.optimizers, epoch, float_dtype=torch.float32
        )
        self.checkpointer.save_scheduler_state_dict(self.schedulers, epoch)
        self._save_training_state(epoch, local_step)
        if self.rank == 0:
            finish_checkpoint(self.checkpoints, self.global_step, self.order)
        self.progress.enter(phase)


def run_training(
    *,
    drafter: Drafter,
    verifier: Path,
    verifier_name: str,
    aux_layer_ids: list[int],
    maps: tuple[np.ndarray, np.ndarray] | None,
    samples: dict[str, list[PlacedSample]],
    folder: Path,
    on_step: Callable[[MetricsLine], None],
    progress: JobProgress,
    before_writing: Callable[[], None] = lambda: None,
    trust_remote_code: bool = False,
) -> dict[str, SplitPacking]:
    """Train in `folder` from its last checkpoint on; leave `model/` and `metrics.jsonl` there.

    `verifier`: folder of the checkpoint; `verifier_name`: what the drafter's configuration calls
    it. `aux_layer_ids`: layers that feed the drafter. `maps`: `t2d`, `d2t`; None for the full
    vocabulary. `samples`: `train` and `heldout`. `before_writing` is called before a checkpoint or
    the model is written; what it raises ends the training. Returns how each split was packed.
    Raises `TrainingFailed` when a shard is damaged, the training diverges, or the last validation
    is missing.
    """
    gpu, dtype = prepare(drafter)
    arguments = speculators_arguments(drafter, verifier, aux_layer_ids, gpu, trust_remote_code)
    model_class = SpeculatorModel.registry["eagle3"]
    model = _make_model(model_class, arguments, maps)
    loaders: dict[str, ShardLoader] = {}
    packing: dict[str, SplitPacking] = {}
    hidden_size = model.config.transformer_layer_config.hidden_size
    for split, placed in samples.items():
        loaders[split], packing[split] = make_loader(
            split, placed, drafter, hidden_size, len(aux_layer_ids), dtype
        )
    order = describe_order(loaders["train"].batch_sampler, drafter.epochs)
    warmup_steps = max(1, round(order.steps * drafter.warmup_share))
    checkpoints = folder / "checkpoints"
    last = find_checkpoint(checkpoints, order)
    train_kwargs, val_kwargs = model_class.get_trainer_kwargs(**arguments)
    trainer = ShardTrainer(
        model,
        TrainerConfig(
            lr=drafter.learning_rate,
            muon_lr=drafter.learning_rate,
            num_epochs=drafter.epochs,
            save_path=str(last or checkpoints / "none"),
            resume_from_checkpoint=True,
            train_call_kwargs=train_kwargs,
            val_call_kwargs=val_kwargs,
            optimizer=drafter.optimizer,
            scheduler_type="linear",
            scheduler_warmup_steps=warmup_steps,
            scheduler_total_steps=order.steps,
            checkpoint_freq=drafter.checkpoint_share,
            hidden_states_dtype=dtype,
        ),
        loaders["train"],
        loaders["heldout"],
        checkpoints=checkpoints,
        order=order,
        progress=progress,
        before_writing=before_writing,
    )
    progress.begin(trainer.global_step, order.steps)
    metrics = folder / "metrics.jsonl"
    metrics_logger = logging.getLogger("speculators.metrics")
    metrics_logger.setLevel(logging.INFO)
    if trainer.rank == 0:
        recorder = Recorder(metrics, trainer.global_step, on_step, warmup_steps)
        metrics_logger.addHandler(recorder)
    trainer.run_training()
    if trainer.rank == 0:
        metrics_logger.removeHandler(recorder)
        before_writing()
        _check_finished(metrics, drafter.epochs)
        _write_model(trainer, folder, verifier_name)
    maybe_destroy_distributed()
    return packing


def _make_model(
    model_class: Any, arguments: dict[str, Any], maps: tuple[np.ndarray, np.ndarray] | None
) -> Any:
    """The drafter with its first weights; one that continues a checkpoint keeps its own map."""
    t2d, d2t = (torch.from_numpy(m) for m in maps) if maps else (None, None)
    if d2t is not None:
        size = len(d2t)
    else:
        verifier = Path(arguments["verifier_name_or_path"])
        size = text_config(verifier, arguments["trust_remote_code"]).vocab_size
    if arguments["from_pretrained"]:
        t2d = d2t = None
    return build_draft_model(Arguments(arguments), model_class, t2d, d2t, size)


def _check_finished(metrics: Path, epochs: int) -> None:
    if not any(x.validation and x.epoch == epochs - 1 for x in read_metrics(metrics)):
        raise TrainingFailed(
            f"{metrics}: holds no validation of the last epoch ({epochs}); the training did not "
            "reach its end. Run again: it resumes from its last checkpoint"
        )


def _write_model(trainer: ShardTrainer, folder: Path, verifier_name: str) -> None:
    """Write the drafter to `folder/model` in bf16, so that it is whole or absent."""
    temporary, final = folder / ".model", folder / "model"
    shutil.rmtree(temporary, ignore_errors=True)
    model: Any = getattr(trainer.model, "module", trainer.model)
    # A path of this machine would be the only thing that ties the drafter to it.
    model.config.speculators_config.verifier.name_or_path = verifier_name
    model.to(torch.bfloat16).save_pretrained(temporary)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    sync_folder(folder)
