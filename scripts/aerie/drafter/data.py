"""Training data: samples of the store's shards, cut, packed into sequences, and read ahead.

Alignment (speculators' `shift_batch`): slot i takes embed(x[i+1]) and the states of position i,
and learns the verifier's distribution after x[i+1]; the loss mask is that of x[i+1].
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.dataloader import _worker_init_fn
from speculators.train.distributed import get_dp_rank, get_dp_size, get_local_rank
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from torch.utils.data import DataLoader

from aerie.common.errors import InputError, UnusableStates
from aerie.common.files import digest
from aerie.config import Drafter
from aerie.drafter.checkpoints import SampleOrder
from aerie.drafter.errors import TrainingFailed
from aerie.drafter.packing import SplitPacking, count_cuts, cut_sample, pack_epoch, padding_share
from aerie.samples.file import TokenizedSample
from aerie.states.manifest import LaneManifest
from aerie.states.shard import Sample, Shard
from aerie.states.store import Store

logger = logging.getLogger(__name__)

OPEN_SHARDS = 64
"""Shards that a process holds open; usually more than a window of `pack_epoch` has."""

Batch = dict[str, Any]


@dataclass(frozen=True)
class PlacedSample:
    """A sample and where its hidden states are: sample `number` of the file `shard`."""

    sample: TokenizedSample
    shard: Path
    number: int


def place_samples(
    samples: dict[str, TokenizedSample], lanes: list[LaneManifest], store: Path
) -> dict[str, list[PlacedSample]]:
    """The samples that were extracted, by split; `lanes` are the manifests of all lanes.

    Shards come in the order of their samples' ids, whatever lane made them and however they are
    stored. Raises `InputError` for a shard that is absent or has another size than its manifest
    says, and when the manifests do not account for exactly these samples.
    """
    if len({lane.convention.key for lane in lanes}) > 1:
        raise InputError(
            "the lanes' manifests have different conventions (verifier, layers, format); delete "
            "hidden_states/lane-*.json of the run and start it again"
        )
    extracted = {i for lane in lanes for entry in lane.shards for i in entry.samples}
    left_out = {i for lane in lanes for i in lane.quarantined}
    if wrong := (extracted | left_out) ^ samples.keys():
        raise InputError(
            f"{len(wrong)} samples are in samples.parquet or in the lanes' manifests but not in "
            f"both ({', '.join(sorted(wrong)[:3])}); delete hidden_states/lane-*.json of the run "
            "and start it again"
        )
    shards = {
        store / "hidden_states" / lane.convention.key / entry.file: entry
        for lane in lanes
        for entry in lane.shards
    }
    placed: dict[str, list[PlacedSample]] = {"train": [], "heldout": []}
    for path, entry in sorted(shards.items(), key=lambda found: found[1].samples):
        if not path.is_file() or path.stat().st_size != entry.bytes:
            raise InputError(
                f"{path}: the shard is missing or cut short; start the run again to extract it"
            )
        for number, name in enumerate(entry.samples):
            sample = samples[name]
            placed[sample.split].append(PlacedSample(sample, path, number))
    return placed


class ShardDataset(BaseDataset):
    """Samples with their states and loss masks, as speculators' collator takes them.

    An item is a piece of a sample (`packing.cut_sample`); `members` has the sample and the piece of
    each. Unlike speculators' own data set it never skips a sample: states that are missing or
    belong to other tokens stop the training.
    """

    def __init__(self, placed: list[PlacedSample], max_len: int, dtype: torch.dtype):
        self.ids = [p.sample.id for p in placed]
        self.masks = [np.asarray(p.sample.loss_mask, dtype=bool) for p in placed]
        self.tokens = [np.asarray(p.sample.input_ids, dtype=np.int32) for p in placed]
        self.places = [(p.shard, p.number) for p in placed]
        self.pieces = [cut_sample(mask, max_len) for mask in self.masks]
        self.members = [(row, piece) for row, cut in enumerate(self.pieces) for piece in cut]
        self._open: dict[Path, Shard] = {}
        super().__init__(max_len, dtype)

    def __len__(self) -> int:
        return len(self.members)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def _compute_approx_lengths(self) -> list[int]:
        # The collator drops each item's first position, see `shift_batch`.
        return [piece.slots for _, piece in self.members]

    def shards(self) -> list[Path]:
        """The shard of each item."""
        return [self.places[row][0] for row, _ in self.members]

    def _read(self, row: int) -> Sample:
        """A whole sample. Raises `TrainingFailed`, after moving the shard aside, when it is damaged
        or does not belong to the sample."""
        path, number = self.places[row]
        try:
            if path not in self._open:
                while len(self._open) >= OPEN_SHARDS:
                    del self._open[next(iter(self._open))]
                self._open[path] = Shard(path)
            found = self._open[path].read(number)
        except UnusableStates as error:
            raise self._refuse(row, str(error)) from error
        if not np.array_equal(found.tokens.numpy(), self.tokens[row]):
            raise self._refuse(
                row, f"sample {self.ids[row]}: the states in {path} belong to other tokens"
            )
        # None: the last layer's states are stored everywhere.
        if found.loss_mask is not None and not np.array_equal(found.loss_mask, self.masks[row]):
            raise self._refuse(
                row,
                f"sample {self.ids[row]}: the last layer's states in {path} were stored for "
                "another loss mask",
            )
        return found

    def _refuse(self, row: int, reason: str) -> TrainingFailed:
        """Move the sample's shard aside so that the next run extracts it; the error to raise."""
        aside = Store.set_aside(self.places[row][0])
        # None: another worker or rank was first.
        moved = f"the shard was moved to {aside}" if aside else "it is no longer there"
        return TrainingFailed(
            f"{reason}; {moved}. Start the run again: it extracts the shard again and resumes the "
            "training from its last checkpoint"
        )

    def _get_raw_data(self, index: int) -> Batch:
        """`hidden_states` [T, aux layers x hidden], `input_ids` int64 [T],
        `verifier_last_hidden_states` [T, hidden], `loss_mask` bool [T]; states are bf16."""
        row, piece = self.members[index]
        found = self._read(row)
        part = slice(piece.start, piece.stop)
        mask = torch.from_numpy(self.masks[row][part].copy())
        mask[: piece.learn - piece.start] = False
        return {
            "hidden_states": found.states[part, :-1].flatten(1),
            "input_ids": found.tokens[part],
            "verifier_last_hidden_states": found.states[part, -1],
            "loss_mask": mask,
        }

    def __getitem__(self, index: int) -> Batch:
        item: Any = super().__getitem__(index)
        item["position_ids"] += self.members[index][1].start
        return item

    def __getitems__(self, indices: list[int]) -> list[Batch] | TrainingFailed:
        """The items of a batch. A failure is returned for `ShardLoader` to raise: torch would wrap
        one that a worker process raises into that process's traceback."""
        try:
            return [self[i] for i in indices]
        except TrainingFailed as error:
            return error


@dataclass
class Collate:
    """A collator that lets a failure through."""

    collate: CollateFn

    def __call__(self, items: list[Batch] | TrainingFailed) -> Batch | TrainingFailed:
        return items if isinstance(items, TrainingFailed) else self.collate(items)


class PackSampler(MultipackDistributedBatchSamplerV2):
    """speculators' batch sampler with the order and the packing of `aerie.drafter.packing`.

    speculators' trainer resumes from it in the middle of an epoch: it asks for the epoch's batches
    and skips those it had.
    """

    _cached_generated_batches: tuple[int, list[list[int]]]

    def __init__(self, dataset: ShardDataset, capacity: int, seed: int, shuffle: bool):
        super().__init__(capacity, dataset.approx_lengths, get_dp_size(), get_dp_rank(), seed=seed)
        self.shards = dataset.shards()
        self.shuffle = shuffle

    def order(self, epoch: int) -> list[list[int]]:
        """The sequences of all ranks in this epoch."""
        rng = np.random.default_rng([self.seed, epoch]) if self.shuffle else None
        capacity, ranks = self.batch_max_length, self.num_replicas
        return pack_epoch(self.lengths, self.shards, capacity, rng, ranks)

    def _generate_batches(self, epoch: int) -> list[list[int]]:  # type: ignore[override]
        if self._cached_generated_batches[0] != epoch:
            mine = self.order(epoch)[self.rank :: self.num_replicas]
            self._cached_generated_batches = (epoch, mine)
        return self._cached_generated_batches[1]


class ShardLoader(DataLoader):
    """Batches made ahead of the step: by worker processes or, without, by one thread.

    The thread prepares the next batch while the step computes: decompression and copies release
    Python's lock. It needs no memory beyond that batch.
    """

    batch_sampler: PackSampler

    def __init__(self, dataset: ShardDataset, sampler: PackSampler, collate: Collate, workers: int):
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

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        batches = super().__iter__()
        for batch in batches if self.num_workers else _read_ahead(batches):
            if isinstance(batch, TrainingFailed):
                raise batch
            yield batch


def _read_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    with ThreadPoolExecutor(1, "read-ahead", _use_rank_device) as pool:
        ahead = pool.submit(next, batches, None)
        while (batch := ahead.result()) is not None:
            ahead = pool.submit(next, batches, None)
            yield batch


def _use_rank_device() -> None:
    """Have the pinned memory of this thread belong to the rank's device."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(get_local_rank())


def make_loader(
    split: str,
    placed: list[PlacedSample],
    drafter: Drafter,
    hidden_size: int,
    aux_layers: int,
    dtype: torch.dtype,
) -> tuple[ShardLoader, SplitPacking]:
    """Packed sequences of `train` (shuffled) or `heldout`, and how they were packed.

    `hidden_size`: of one state; `dtype`: of the states in a batch.
    """
    if not placed:
        raise TrainingFailed(f"no {split} samples were extracted, but training needs some")
    length = drafter.sequence_length
    dataset = ShardDataset(placed, length, dtype)
    sampler = PackSampler(dataset, length, drafter.seed, shuffle=split == "train")
    collate = CollateFn(
        length, hidden_size, num_target_layers=aux_layers, dtype=dtype, preprocess=shift_batch
    )
    packing = describe_packing(dataset, sampler)
    logger.info(
        f"{split}: {packing.samples} samples in {packing.sequences} sequences of {length} tokens, "
        f"{packing.padding_share:.1%} padding; {packing.cut_samples} longer samples were cut into "
        f"{packing.pieces} pieces, {packing.cut_supervised} of the cuts within an answer"
    )
    return ShardLoader(dataset, sampler, Collate(collate), drafter.loader_workers), packing


def describe_order(sampler: PackSampler, epochs: int) -> SampleOrder:
    orders = [sampler.order(epoch) for epoch in range(epochs)]
    ranks = sampler.num_replicas
    steps = sum(len(order) for order in orders) // ranks
    return SampleOrder(steps=steps, ranks=ranks, digest=digest(orders))


def describe_packing(dataset: ShardDataset, sampler: PackSampler) -> SplitPacking:
    sequences = sampler.order(0)
    padding = padding_share(sampler.lengths, sequences, sampler.batch_max_length)
    return SplitPacking(
        samples=len(dataset.masks),
        sequences=len(sequences),
        padding_share=round(padding, 5),
        **count_cuts(dataset.masks, dataset.pieces),
    )
