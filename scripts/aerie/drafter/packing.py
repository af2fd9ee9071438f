"""Packing samples into training sequences: where long samples are cut, the order of an epoch.

Lengths are in slots. A sample of T tokens has T - 1: its first token has no state before it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aerie.common.records import Record

WINDOW_SEQUENCES = 64
"""Sequences packed together, at least. With a window of this size best-fit-decreasing pads the
lengths of real conversations by 1 to 2 % (benchmarks/pack_samples.py)."""

WINDOW_SHARDS = 8
"""Shards mixed with each other, at least; a shard mostly holds records of one source."""


class SplitPacking(Record):
    """How the samples of a split were packed."""

    samples: int
    sequences: int
    """In the first epoch."""
    padding_share: float
    """Of the slots of the first epoch."""
    cut_samples: int
    """Samples longer than a sequence."""
    pieces: int
    """What those were cut into."""
    cut_supervised: int
    """Cuts within an answer, which happen only to answers longer than a sequence."""
    tokens_left_out: int
    """Tokens of cut samples that are in no piece; none of them is supervised."""


class Piece(NamedTuple):
    """Tokens [start, stop) of a sample; loss is taken from position `learn` on."""

    start: int
    stop: int
    learn: int

    @property
    def slots(self) -> int:
        return max(1, self.stop - self.start - 1)


def cut_sample(mask: np.ndarray, length: int) -> list[Piece]:
    """Cut a sample with this loss mask (bool [T]) into pieces of at most `length` slots.

    Every supervised token is learned once. Supervised text is cut only when it alone is longer
    than a piece; the piece that continues it repeats an eighth of its length without loss.
    Otherwise a piece starts where the one before it stopped or, when that is too far back, as far
    before the supervised text as fits. Text after the last supervised token is left out.
    """
    if len(mask) - 1 <= length:
        return [Piece(0, len(mask), 0)]
    room, look_back = length + 1, max(1, length // 8)
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    pieces: list[Piece] = []
    start = stop = learn = 0
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        if last - start > room:
            if stop > start:
                pieces.append(Piece(start, stop, learn))
            # The first supervised token needs the state of the one before it.
            fits = last - first < room
            start = learn = max(stop, last - room if fits else first - 1 - look_back)
            while last - start > room:
                pieces.append(Piece(start, start + room, learn))
                learn = start + room
                start = learn - look_back
        stop = last
    if stop > start:
        pieces.append(Piece(start, stop, learn))
    return pieces


def count_cuts(masks: Sequence[np.ndarray], pieces: Sequence[Sequence[Piece]]) -> dict[str, int]:
    """What was cut: the keys of `SplitPacking` that are about cuts."""
    counts = dict.fromkeys(("cut_samples", "pieces", "cut_supervised", "tokens_left_out"), 0)
    for mask, parts in zip(masks, pieces, strict=True):
        if len(parts) == 1 and parts[0].stop - parts[0].start == len(mask):
            continue
        covered = np.zeros(len(mask), dtype=bool)
        for piece in parts:
            covered[piece.start : piece.stop] = True
        counts["cut_samples"] += 1
        counts["pieces"] += len(parts)
        counts["cut_supervised"] += sum(
            bool(mask[p.learn] and p.learn and mask[p.learn - 1]) for p in parts
        )
        counts["tokens_left_out"] += int((~covered).sum())
    return counts


def best_fit(lengths: np.ndarray, members: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing: each member, longest first, goes where it leaves the least room.

    Source: Johnson, Near-optimal bin packing algorithms (MIT, 1973). A member longer than
    `capacity` gets a sequence of its own.
    """
    sequences: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (slots free, sequence), sorted
    for member in sorted(members, key=lambda m: -lengths[m]):
        place = bisect_left(rooms, (lengths[member], -1))
        if place < len(rooms):
            free, sequence = rooms.pop(place)
        else:
            free, sequence = capacity, len(sequences)
            sequences.append([])
        sequences[sequence].append(member)
        insort(rooms, (free - int(lengths[member]), sequence))
    return sequences


def pack_epoch(
    lengths: np.ndarray,
    shards: Sequence[Any],
    capacity: int,
    rng: np.random.Generator | None,
    ranks: int = 1,
) -> list[list[int]]:
    """The sequences of an epoch in order, as lists of members; rank r of R takes every R-th.

    `lengths` int [N], slots; `shards` [N]: the shard of each. With `rng` the shards are
    shuffled and read window by window, a window being some whole shards; within it members and
    sequences are shuffled. Without, everything stays in the order given. Each member occurs once,
    and the number of sequences is a multiple of `ranks` (some are empty when there are too few
    members).
    """
    lengths = np.asarray(lengths)
    groups: dict[Any, list[int]] = {}
    for member, shard in enumerate(shards):
        groups.setdefault(shard, []).append(member)
    order = list(groups.values())
    if rng is not None:
        order = [order[i] for i in rng.permutation(len(order))]

    sequences: list[list[int]] = []
    window: list[int] = []
    opened, size, rest = 0, 0, int(lengths.sum())
    for number, group in enumerate(order, 1):
        window += group
        opened += 1
        size += int(lengths[group].sum())
        rest -= int(lengths[group].sum())
        enough = WINDOW_SEQUENCES * capacity
        # A small rest at the end would pack badly alone.
        if number < len(order) and (size < enough or opened < WINDOW_SHARDS or rest < enough):
            continue
        if rng is not None:
            rng.shuffle(window)
        packed = best_fit(lengths, window, capacity)
        # The emptiest sequence waits for the next window.
        spare = min(packed, key=lambda s: lengths[s].sum()) if number < len(order) else []
        packed = [sorted(s) for s in packed if s is not spare]
        if rng is not None:
            rng.shuffle(packed)
        sequences += packed
        window, opened, size = list(spare), 0, int(lengths[spare].sum())

    while len(sequences) % ranks:
        largest = max(range(len(sequences)), key=lambda i: len(sequences[i]))
        full = sequences[largest]
        sequences[largest] = full[::2]
        sequences.append(full[1::2])
    return sequences


def padding_share(lengths: np.ndarray, sequences: Sequence[Sequence[int]], capacity: int) -> float:
    """Share of all slots of the sequences that hold no member."""
    filled = sum(int(lengths[list(s)].sum()) for s in sequences)
    return 1 - filled / (capacity * len(sequences)) if sequences else 0.0
