"""Training a drafter with speculators' own model and trainer, fed from our shards.

Alignment (speculators' `shift_batch`): slot i takes embed(x[i+1]) and the states of position i,
and learns the verifier's distribution after x[i+1]; the loss mask is that of x[i+1].
"""

import json
import logging
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.optim._muon as muon
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from speculators.model import SpeculatorModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import checkpointer
from speculators.train.cli import build_draft_model
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.dataloader import _worker_init_fn
from speculators.train.distributed import get_dp_rank, get_dp_size, get_local_rank
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader

from aerie.common.errors import InputError, PermanentError, UnusableStates
from aerie.common.files import digest, read_json, sync_folder, write_json
from aerie.common.machine import computes_bf16
from aerie.common.progress import JobProgress
from aerie.drafter.packing import count_cuts, cut_sample, pack_epoch, padding_share
from aerie.samples.file import TokenizedSample
from aerie.states.shard import Shard
from aerie.states.store import Store

logger = logging.getLogger(__name__)


class TrainingFailed(PermanentError):
    """Training that must not go on, or that ended without what it should have written."""


# Reading shards


OPEN_SHARDS = 64
"""Shards held open by a process; more than a window of `pack_epoch` has, in most cases."""


class ShardTransfer(HiddenStatesTransfer):
    """Samples from shards, by their number in the list of places it was made with."""

    def __init__(self, places: list[tuple[str, int]]):
        self.places = places
        self._open: dict[str, Shard] = {}

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """`hidden_states` bf16 [T, ids, hidden], `token_ids` int64 [T], and `loss_mask` bool [T],
        where the last state is stored (None: everywhere).

        Raises `TrainingFailed` for a damaged shard, after it was moved aside.
        """
        path, number = self.places[file_idx]
        try:
            if path not in self._open:
                while len(self._open) >= OPEN_SHARDS:
                    del self._open[next(iter(self._open))]
                self._open[path] = Shard(Path(path))
            sample = self._open[path].read(number)
        except UnusableStates as error:
            raise self.refuse(file_idx, str(error)) from error
        return {
            "hidden_states": sample.states,
            "token_ids": sample.tokens,
            "loss_mask": sample.loss_mask,
        }

    def refuse(self, file_idx: int, reason: str) -> TrainingFailed:
        """Move the shard of this sample aside, so that it is made anew; the error to raise."""
        aside = Store.set_aside(Path(self.places[file_idx][0]))
        # Else another worker or rank was first.
        moved = f"the shard was moved to {aside}" if aside else "it is no longer there"
        return TrainingFailed(
            f"{reason}; {moved}. Start the run again: the shard is made anew and the training "
            "goes on from its last checkpoint"
        )

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        raise TrainingFailed("hidden states are not made during training")

    def __getstate__(self) -> dict[str, Any]:
        return {"places": self.places, "_open": {}}


@HiddenStatesBackend.register("aerie")
class ShardBackend(HiddenStatesBackend):
    """hs-connectors' extension point; `args.hidden_states_path` is a JSON file of places."""

    @staticmethod
    def add_train_args(parser: Any) -> None:
        parser.add_argument("--hidden-states-path", required=True)

    @staticmethod
    def add_launch_args(parser: Any) -> None:
        pass

    @staticmethod
    def from_train_args(args: Any, data_path: str) -> ShardTransfer:
        places = read_json(Path(args.hidden_states_path))
        return ShardTransfer([(path, number) for path, number in places])

    @staticmethod
    def build_kv_transfer_config(args: Any) -> dict[str, Any]:
        raise NotImplementedError("extract_hidden_states.py starts its engine itself")


class ShardDataset(BaseDataset):
    """Samples with their loss masks, as speculators' collator takes them; long ones in pieces.

    Unlike speculators' own data set it never leaves a sample out: states that are missing or
    belong to other tokens stop the training. `members`: the row and the piece of each item.
    """

    def __init__(
        self, rows: list[TokenizedSample], transfer: ShardTransfer, max_len: int, dtype: torch.dtype
    ):
        self.masks = [np.asarray(r.loss_mask, dtype=bool) for r in rows]
        self.ids = [r.id for r in rows]
        self.tokens = [np.asarray(r.input_ids, dtype=np.int32) for r in rows]
        self.transfer = transfer
        self.pieces = [cut_sample(mask, max_len) for mask in self.masks]
        self.members = [(row, piece) for row, cut in enumerate(self.pieces) for piece in cut]
        super().__init__(max_len, dtype)

    def __len__(self) -> int:
        return len(self.members)

    def _compute_approx_lengths(self) -> list[int]:
        # The collator drops each item's first position, see `shift_batch`.
        return [piece.slots for _, piece in self.members]

    def shards(self) -> list[str]:
        """The shard file of each item."""
        return [self.transfer.places[row][0] for row, _ in self.members]

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
        row, piece = self.members[index]
        found = self.transfer.get_cached(row)
        tokens, states = found["token_ids"], found["hidden_states"]
        if not np.array_equal(tokens.numpy(), self.tokens[row]):
            raise self.transfer.refuse(
                row,
                f"sample {self.ids[row]}: the states in {self.transfer.places[row][0]} belong to "
                "other tokens",
            )
        stored = found["loss_mask"]
        if stored is not None and not np.array_equal(stored, self.masks[row]):
            raise self.transfer.refuse(
                row,
                f"sample {self.ids[row]}: the last states in {self.transfer.places[row][0]} are "
                "those of another loss mask",
            )
        part = slice(piece.start, piece.stop)
        mask = torch.from_numpy(self.masks[row][part].copy())
        mask[: piece.learn - piece.start] = False
        return {
            "hidden_states": states[part, :-1].flatten(1),
            "input_ids": tokens[part],
            "verifier_last_hidden_states": states[part, -1],
            "loss_mask": mask,
        }

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        item["position_ids"] += self.members[index][1].start
        return item


class PackSampler(MultipackDistributedBatchSamplerV2):
    """speculators' batch sampler, with the order and the packing of `aerie.drafter.packing`.

    It is what speculators' trainer goes on from in the middle of an epoch: the trainer asks for
    the batches of the epoch and skips those it had.
    """

    def __init__(self, dataset: ShardDataset, capacity: int, seed: int, shuffle: bool):
        super().__init__(capacity, dataset.approx_lengths, get_dp_size(), get_dp_rank(), seed=seed)
        self.shards = dataset.shards()
        self.shuffle = shuffle

    def order(self, epoch: int) -> list[list[int]]:
        """The sequences of all ranks in this epoch."""
        rng = np.random.default_rng([self.seed, epoch]) if self.shuffle else None
        capacity, ranks = self.batch_max_length, self.num_replicas
        return pack_epoch(self.lengths, self.shards, capacity, rng, ranks)

    def _generate_batches(self, epoch: int) -> list[list[int]]:
        if self._cached_generated_batches[0] != epoch:
            mine = self.order(epoch)[self.rank :: self.num_replicas]
            self._cached_generated_batches = (epoch, mine)
        return self._cached_generated_batches[1]


def _use_rank_device() -> None:
    """Have pinned memory belong to this rank's device, in a thread of its own."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(get_local_rank())


class ShardLoader(DataLoader):
    """Batches made ahead of the step: by worker processes or, without, by one thread.

    The thread has the next batch ready while the step computes: decompression and copies release
    Python's lock. It needs no memory beyond that batch.
    """

    def __init__(
        self, dataset: ShardDataset, sampler: PackSampler, collate: CollateFn, workers: int
    ):
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="spawn" if workers else None,
            worker_init_fn=_worker_init_fn if workers else None,
            pin_memory=torch.cuda.is_available(),
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        batches = super().__iter__()
        if self.num_workers:
            yield from batches
            return
        with ThreadPoolExecutor(1, "read-ahead", _use_rank_device) as pool:
            ahead = pool.submit(next, batches, None)
            while (batch := ahead.result()) is not None:
                ahead = pool.submit(next, batches, None)
                yield batch


def place_samples(
    rows: dict[str, TokenizedSample], manifests: list[dict[str, Any]], store: Path
) -> dict[str, tuple[list[TokenizedSample], list[tuple[str, int]]]]:
    """By split: the rows that were extracted, and for each the shard file and its number there.

    The shards come in the order of their samples' ids, whatever lane made them and however they
    are stored. Raises `InputError` for a shard that is absent or has another size than its
    manifest says, and when the manifests are not all that there are of these samples.
    """
    if len({manifest["convention"]["key"] for manifest in manifests}) > 1:
        raise InputError(
            "the lanes' manifests are of several conventions (verifier, layers, format); delete "
            "hidden_states/lane-*.json of the run and start it again"
        )
    named = [i for m in manifests for entry in m["shards"] for i in entry["samples"]]
    accounted = {*named, *(i for m in manifests for i in m.get("quarantined", ()))}
    if wrong := accounted ^ rows.keys():
        raise InputError(
            f"{len(wrong)} samples are in samples.parquet or in the lanes' manifests but not in "
            f"both ({', '.join(sorted(wrong)[:3])}); delete hidden_states/lane-*.json of the run "
            "and start it again"
        )
    found: dict[str, tuple[list[TokenizedSample], list[tuple[str, int]]]] = {
        "train": ([], []),
        "heldout": ([], []),
    }
    entries = {
        store / "hidden_states" / manifest["convention"]["key"] / entry["file"]: entry
        for manifest in manifests
        for entry in manifest["shards"]
    }
    for path, entry in sorted(entries.items(), key=lambda found: found[1]["samples"]):
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise InputError(
                f"{path}: the shard is missing or cut short; start the run again, it is made anew"
            )
        for number, sample in enumerate(entry["samples"]):
            row = rows[sample]
            found[row.split][0].append(row)
            found[row.split][1].append((str(path), number))
    return found


# Training


ZERO_STEPS = 20
"""Steps in a row with an accuracy of exactly 0, after the warm-up, that end a training. A single
small batch can miss every token by chance."""


class Recorder(logging.Handler):
    """Writes speculators' metric records as JSON lines, and stops a training that went wrong.

    A line of training has `step`, `epoch`, `loss` (the sum over the TTT steps, each weighted by
    `ttt_step_loss_decay` to the power of its number, of the mean KL divergence of the supervised
    tokens: speculators' `compute_metrics`), `accuracy` (cumulative, by TTT step),
    `conditional_accuracy`, `learning_rate`, `tokens_per_second`, `wait_share` (of the step spent
    waiting for data); one of validation has `validation: true` and no speed.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int,
        on_step: Callable[[dict[str, Any]], None],
        warmup_steps: int = 0,
    ):
        super().__init__()
        self.warmup_steps = warmup_steps
        self._zeros = 0
        kept = []
        if path.is_file():
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except ValueError:
                    break
                if line["step"] < resume_step or (
                    line.get("validation") and line["step"] <= resume_step
                ):
                    kept.append(text)
        path.write_text("".join(text + "\n" for text in kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")
        self.on_step = on_step

    def emit(self, record: logging.LogRecord) -> None:
        message = record.msg
        if not isinstance(message, dict) or not ({"train", "val"} & set(message)):
            return
        validation = "val" in message
        values = {
            k.removesuffix("_epoch"): v
            for k, v in message["val" if validation else "train"].items()
        }
        line: dict[str, Any] = {
            "step": message.get("global_step", getattr(record, "step", None)),
            "epoch": message["epoch"],
            "loss": values["loss"],
            "accuracy": _by_step(values, "full_acc_"),
            "conditional_accuracy": _by_step(values, "cond_acc_"),
        }
        if validation:
            line["validation"] = True
        else:
            profile = message.get("profile") or {}
            rates = message["lr"]
            line["learning_rate"] = max(rates.values()) if isinstance(rates, dict) else rates
            line["tokens_per_second"] = round(profile.get("tokens_per_s", 0.0), 1)
            line["wait_share"] = round(profile.get("queue_ms", 0) / profile["step_ms"], 5)
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        self._check(line, values)
        self.on_step(line)

    def _check(self, line: dict[str, Any], values: dict[str, float]) -> None:
        """Raise `TrainingFailed` on what no healthy training shows."""
        place = f"{'validation after ' if 'validation' in line else ''}step {line['step']}"
        if not math.isfinite(line["loss"]):
            raise TrainingFailed(f"{place}: the loss is {line['loss']}")
        if values.get("error_records"):
            raise TrainingFailed(f"{place}: the trainer dropped samples")
        if line["loss"] == 0:
            raise TrainingFailed(
                f"{place}: the loss is exactly 0, so nothing is supervised; look at a few samples "
                "with `make inspect`"
            )
        if "validation" in line or line["step"] < self.warmup_steps:
            return
        self._zeros = 0 if any(line["accuracy"]) else self._zeros + 1
        if self._zeros >= ZERO_STEPS:
            raise TrainingFailed(
                f"{place}: the accuracy has been exactly 0 for {ZERO_STEPS} steps after the "
                "warm-up; the states and the tokens they are compared with do not belong together"
            )

    def handleError(self, record: logging.LogRecord) -> None:
        raise


def _by_step(values: dict[str, float], prefix: str) -> list[float]:
    count = sum(k.startswith(prefix) for k in values)
    return [values[f"{prefix}{k}"] for k in range(count)]


class ShardTrainer(Trainer):
    """speculators' trainer with whole checkpoints, and able to run without a GPU.

    Checkpoints are folders `step-N` under `checkpoints`, each written under another name, synced
    and renamed; `step-N/<epoch>/` is what speculators itself writes and resumes from, its
    position in the epoch included, `step-N/order.json` what the order of the samples was (see
    `describe_order`). Only the newest is kept. No random number is drawn after the weights are
    made and each epoch's order comes from the seed and the epoch alone, so there is no other
    random state to keep. `progress` is told what the trainer is at; `before_writing` is called
    before a checkpoint is, and may raise.
    """

    def __init__(
        self,
        *args: Any,
        checkpoints: Path,
        order: dict[str, Any],
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
        # speculators saves an epoch's end before it is validated; killed between the two, the
        # validation would never be made. So that one is saved in `maybe_update_best`.
        if local_step > 0:
            self._save(epoch, local_step)

    def maybe_update_best(self, epoch: int, val_metrics: dict[str, float] | None) -> None:
        self._save(epoch, 0)

    def _save(self, epoch: int, local_step: int) -> None:
        before = self.progress.phase
        self.before_writing()
        self.progress.enter("saving")
        temporary = self.checkpoints / ".writing"
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.checkpointer.path = temporary
        self.checkpointer.save_checkpoint(
            self.model, self.optimizers, epoch, float_dtype=torch.float32
        )
        self.checkpointer.save_scheduler_state_dict(self.schedulers, epoch)
        self._save_training_state(epoch, local_step)
        if self.rank == 0:
            write_json(temporary / "order.json", self.order)
            for file in temporary.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            sync_folder(temporary / str(epoch))
            final = self.checkpoints / f"step-{self.global_step:09d}"
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            sync_folder(self.checkpoints)
            for old in whole_checkpoints(self.checkpoints)[:-1]:
                shutil.rmtree(old, ignore_errors=True)
        self.progress.enter(before)


def orthogonalize(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Newton-Schulz iteration of Muon in float32.

    torch 2.13.0 iterates in bf16, which a CPU without bf16 arithmetic does in a scalar kernel,
    ten times slower. Source: Jordan et al., Muon (2024); same iteration as `torch.optim.Muon`.
    """
    a, b, c = coefficients
    tall = gradient.size(0) > gradient.size(1)
    x = gradient.float().T if tall else gradient.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def describe_order(sampler: PackSampler, epochs: int) -> dict[str, Any]:
    """What a checkpoint must agree on to be gone on from: the sequences of every epoch.

    `steps` in all, `ranks`, `digest` of the sequences in order.
    """
    orders = [sampler.order(epoch) for epoch in range(epochs)]
    ranks = sampler.num_replicas
    return {
        "steps": sum(len(order) for order in orders) // ranks,
        "ranks": ranks,
        "digest": digest(orders),
    }


def describe_packing(dataset: ShardDataset, sampler: PackSampler) -> dict[str, Any]:
    """Samples, the sequences they fill in the first epoch, `padding_share`, and what was cut
    (`packing.count_cuts`)."""
    sequences = sampler.order(0)
    return {
        "samples": len(dataset.masks),
        "sequences": len(sequences),
        "padding_share": round(
            padding_share(sampler.lengths, sequences, sampler.batch_max_length), 5
        ),
        **count_cuts(dataset.masks, dataset.pieces),
    }


def whole_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def follow_hints() -> None:
    """Set for this trainer on a GPU what torch and tokenizers ask for in their hints; say so once.

    What the user set in the environment stays. Nothing of it on a CPU, where another number of
    threads would give other rounding errors, or in the engine, whose states TF32 would change.
    """
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_float32_matmul_precision("high")
    # torchrun gives each of several processes one thread where nobody says otherwise.
    if os.environ.get("OMP_NUM_THREADS") == "1" and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("aerie").info(
            "set by Aerie: TF32 for float32 products, PYTORCH_ALLOC_CONF=%s, "
            "TOKENIZERS_PARALLELISM=%s, %d threads",
            os.environ["PYTORCH_ALLOC_CONF"],
            os.environ["TOKENIZERS_PARALLELISM"],
            torch.get_num_threads(),
        )


def run_training(
    *,
    settings: dict[str, Any],
    verifier: Path,
    verifier_name: str,
    layer_ids: list[int],
    maps: tuple[np.ndarray, np.ndarray] | None,
    samples: dict[str, tuple[list[TokenizedSample], list[tuple[str, int]]]],
    folder: Path,
    on_step: Callable[[dict[str, Any]], None],
    progress: JobProgress,
    before_writing: Callable[[], None] = lambda: None,
    trust_remote_code: bool = False,
) -> dict[str, dict[str, Any]]:
    """Train in `folder` from its last whole checkpoint on; leave `model/` and `metrics.jsonl`.

    `settings`: the keys of a drafter in the configuration. `verifier_name`: what the drafter's
    configuration calls the verifier. `layer_ids`: those fed to the
    drafter. `maps`: `t2d`, `d2t`; None for the full vocabulary. `on_step(line)` gets each metrics
    line. `progress`: told of the phases and of the steps to do. `before_writing`: called before a
    checkpoint or the model is written; what it raises ends the training. Returns how the samples
    were packed, by split (`describe_packing`). Raises `TrainingFailed` when the last validation is
    missing, or when a shard is damaged.
    """
    from speculators.train.distributed import maybe_destroy_distributed

    gpu, dtype = _set_up(settings)
    arguments = _speculators_arguments(settings, verifier, layer_ids, gpu, trust_remote_code)
    t2d, d2t = (torch.from_numpy(m) for m in maps) if maps else (None, None)
    size = len(d2t) if d2t is not None else None
    if size is None:
        from aerie.verifier.checkpoint import text_config

        size = text_config(verifier, trust_remote_code).vocab_size
    namespace = _Namespace(arguments)
    model_class = SpeculatorModel.registry["eagle3"]
    if settings["from_checkpoint"]:
        t2d = d2t = None
    model = build_draft_model(namespace, model_class, t2d, d2t, size)

    loaders, packing = _make_loaders(samples, settings, namespace, model, folder, dtype)
    checkpoints = folder / "checkpoints"
    found = whole_checkpoints(checkpoints)
    train_kwargs, val_kwargs = model_class.get_trainer_kwargs(**arguments)
    order = describe_order(loaders["train"].batch_sampler, settings["epochs"])
    total = order["steps"]
    warmup_steps = max(1, round(total * settings["warmup_share"]))
    if found and (before := read_json(found[-1] / "order.json")) != order:
        raise TrainingFailed(
            f"{found[-1]}: was made with the samples in another order ({before}) than this "
            f"environment gives ({order}); delete {checkpoints} to train from the start"
        )
    trainer = ShardTrainer(
        model,
        TrainerConfig(
            lr=settings["learning_rate"],
            muon_lr=settings["learning_rate"],
            num_epochs=settings["epochs"],
            save_path=str(found[-1] if found else checkpoints / "none"),
            resume_from_checkpoint=True,
            train_call_kwargs=train_kwargs,
            val_call_kwargs=val_kwargs,
            optimizer=settings["optimizer"],
            scheduler_type="linear",
            scheduler_warmup_steps=warmup_steps,
            scheduler_total_steps=total,
            checkpoint_freq=settings["checkpoint_share"],
            hidden_states_dtype=dtype,
        ),
        loaders["train"],
        loaders["heldout"],
        checkpoints=checkpoints,
        order=order,
        progress=progress,
        before_writing=before_writing,
    )
    progress.begin(trainer.global_step, total)
    metrics = folder / "metrics.jsonl"
    metrics_logger = logging.getLogger("speculators.metrics")
    metrics_logger.setLevel(logging.INFO)
    if trainer.rank == 0:
        recorder = Recorder(metrics, trainer.global_step, on_step, warmup_steps)
        metrics_logger.addHandler(recorder)
    try:
        trainer.run_training()
    except TrainingFailed as error:
        # From a worker process it comes with that process's traceback around it.
        message = str(error).rsplit(f"{TrainingFailed.__name__}: ", 1)[-1].strip()
        raise TrainingFailed(message) from error
    if trainer.rank == 0:
        metrics_logger.removeHandler(recorder)
        before_writing()
        _finish(trainer, metrics, folder, settings["epochs"], verifier_name)
    maybe_destroy_distributed()
    return packing


def _set_up(settings: dict[str, Any]) -> tuple[bool, torch.dtype]:
    """Prepare torch and speculators for this machine and seed; whether there are GPUs, and the
    format of the computation, as speculators' autocast takes it (the weights are float32)."""
    from speculators.train.distributed import maybe_setup_distributed

    gpu = torch.cuda.is_available() and settings["gpus"] > 0
    if gpu:
        follow_hints()
        maybe_setup_distributed()
    else:
        # speculators times its steps with this, which fails where there is no accelerator.
        torch.accelerator.synchronize = lambda *_: None
        checkpointer.get_current_device = lambda: "cpu"
        if not computes_bf16():
            muon._zeropower_via_newtonschulz = orthogonalize
    seed = settings["seed"]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return gpu, torch.bfloat16 if computes_bf16() else torch.float32


def _make_loaders(
    samples: dict[str, tuple[list[TokenizedSample], list[tuple[str, int]]]],
    settings: dict[str, Any],
    namespace: "_Namespace",
    model: torch.nn.Module,
    folder: Path,
    dtype: torch.dtype,
) -> tuple[dict[str, ShardLoader], dict[str, dict[str, Any]]]:
    """Loaders of packed sequences by split, and how the samples were packed."""
    length = settings["sequence_length"]
    loaders: dict[str, ShardLoader] = {}
    packing = {}
    for split, (rows, places) in samples.items():
        if not rows:
            raise TrainingFailed(f"no {split} samples were extracted; nothing to train or judge by")
        places_file = folder / f"{split}.places.json"
        places_file.write_text(json.dumps(places), encoding="utf-8")
        namespace.hidden_states_path = str(places_file)
        transfer = HiddenStatesBackend.registry["aerie"].from_train_args(namespace, str(folder))
        dataset = ShardDataset(rows, transfer, length, dtype)
        sampler = PackSampler(dataset, length, settings["seed"], shuffle=split == "train")
        collate = CollateFn(
            length,
            model.config.transformer_layer_config.hidden_size,
            num_target_layers=len(namespace.target_layer_ids),
            dtype=dtype,
            preprocess=shift_batch,
        )
        loaders[split] = ShardLoader(dataset, sampler, collate, settings["loader_workers"])
        packing[split] = describe_packing(dataset, sampler)
        p = packing[split]
        logger.info(
            f"{split}: {p['samples']} samples in {p['sequences']} sequences of {length} tokens, "
            f"{p['padding_share']:.1%} padding; {p['cut_samples']} longer than that, cut into "
            f"{p['pieces']} pieces, {p['cut_supervised']} of the cuts within an answer"
        )
    return loaders, packing


def _finish(
    trainer: ShardTrainer, metrics: Path, folder: Path, epochs: int, verifier_name: str
) -> None:
    lines = read_metrics(metrics)
    last = [x for x in lines if x.get("validation") and x["epoch"] == epochs - 1]
    if not last:
        raise TrainingFailed(
            f"{metrics}: holds no validation of the last epoch ({epochs}); the training did not "
            "reach its end. Run again: it goes on from its last checkpoint"
        )
    temporary, final = folder / ".model", folder / "model"
    shutil.rmtree(temporary, ignore_errors=True)
    model = getattr(trainer.model, "module", trainer.model)
    # A path of this machine would be the only thing that ties the drafter to it.
    model.config.speculators_config.verifier.name_or_path = verifier_name
    model.to(torch.bfloat16).save_pretrained(temporary)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    sync_folder(folder)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a `metrics.jsonl`, see `Recorder`."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


class _Namespace:
    """speculators' training arguments as attributes; one it does not set is None."""

    def __init__(self, values: dict[str, Any]):
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _speculators_arguments(
    settings: dict[str, Any],
    verifier: Path,
    layer_ids: list[int],
    gpu: bool,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """The arguments of `speculators train` for an EAGLE-3 drafter."""
    return {
        "speculator_type": "eagle3",
        "verifier_name_or_path": str(verifier),
        "trust_remote_code": trust_remote_code,
        "from_pretrained": settings["from_checkpoint"],
        "draft_config": None,
        "num_layers": settings["num_layers"],
        "draft_arch": "llama",
        "draft_hidden_act": None,
        "draft_attn_impl": "simple_flex_attention" if gpu else "sdpa",
        "draft_mrope_full_head_hack": True,
        "sliding_window": settings["sliding_window"],
        "full_attention_indices": [],
        "mask_token_id": None,
        "target_layer_ids": layer_ids,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": True,
        "embed_requires_grad": False,
        "ttt_steps": settings["ttt_steps"],
        "ttt_step_loss_decay": settings["ttt_step_loss_decay"],
        "loss_fn": "kl_div",
        "loss_implementation": "fused" if gpu else "eager",
    }
