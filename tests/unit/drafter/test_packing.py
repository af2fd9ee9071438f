import numpy as np
import pytest

from aerie.drafter.packing import (
    WINDOW_SEQUENCES,
    Piece,
    best_fit,
    count_cuts,
    cut_sample,
    pack_epoch,
    padding_share,
)


def mask_of(length, *spans):
    mask = np.zeros(length, dtype=bool)
    for first, last in spans:
        mask[first:last] = True
    return mask


def conversations(count, seed=0):
    """Lengths as real conversations have them: median 190, 1 % above 800."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(5.25, 0.62, count), 20, 1024).astype(int)


def shards_of(count, size=64):
    return [i // size for i in range(count)]


# Cutting


@pytest.mark.parametrize(
    ("mask", "pieces"),
    [
        # Fits: whole, also the text after the last answer.
        (mask_of(11, (4, 9)), [Piece(0, 11, 0)]),
        # A long prompt: its end stays with the answer, 10 slots in all.
        (mask_of(30, (25, 30)), [Piece(19, 30, 19)]),
        # Two turns: cut between them, though 10 slots would reach into the second answer.
        (mask_of(16, (3, 6), (9, 16)), [Piece(0, 6, 0), Piece(6, 16, 6)]),
        # Three short turns: two of them fit together.
        (mask_of(18, (2, 5), (7, 10), (13, 18)), [Piece(0, 10, 0), Piece(10, 18, 10)]),
        # Text after the last answer teaches nothing.
        (mask_of(30, (2, 6)), [Piece(0, 6, 0)]),
        # An answer longer than a piece is cut; the next piece looks back.
        (mask_of(25, (2, 25)), [Piece(0, 11, 0), Piece(10, 21, 11), Piece(20, 25, 21)]),
        (mask_of(30), []),
    ],
)
def test_a_long_sample_is_cut_where_it_costs_no_answer(mask, pieces):
    assert cut_sample(mask, 10) == pieces


def test_every_supervised_token_is_learned_once_and_answers_stay_whole():
    rng = np.random.default_rng(1)
    cut_answers = 0
    for _ in range(500):
        length = int(rng.integers(8, 60))
        edges = np.sort(rng.choice(np.arange(1, 300), 2 * int(rng.integers(1, 8)), replace=False))
        spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        mask = mask_of(300, *spans)
        learned = np.zeros(300, dtype=int)
        pieces = cut_sample(mask, length)
        for start, stop, learn in pieces:
            assert stop - start - 1 <= length
            # Slots are the tokens after the first.
            part = np.arange(start + 1, stop)
            learned[part[mask[part] & (part >= learn)]] += 1
        assert (learned == mask).all()
        for first, last in spans:
            if last - first <= length:
                assert any(start < first and last <= stop for start, stop, _ in pieces)
        long = sum(last - first > length for first, last in spans)
        found = count_cuts([mask], [pieces])["cut_supervised"]
        assert (found > 0) == (long > 0)
        cut_answers += found
    assert cut_answers > 100


def test_cuts_are_counted():
    masks = [mask_of(11, (4, 9)), mask_of(30, (25, 30)), mask_of(25, (2, 25))]
    assert count_cuts(masks, [cut_sample(m, 10) for m in masks]) == {
        "cut_samples": 2,
        "pieces": 4,
        "cut_supervised": 2,
        "tokens_left_out": 19,
    }


# Packing


def test_best_fit_leaves_the_least_room():
    lengths = np.array([7, 2, 6, 3, 5, 4, 3])
    # 7+3, 6+4, 5+3+2: full, where the order given fills four.
    packed = best_fit(lengths, range(7), 10)
    assert sorted(sorted(lengths[s].tolist()) for s in packed) == [[2, 3, 5], [3, 7], [4, 6]]


@pytest.mark.parametrize("capacity", [1024, 2048])
@pytest.mark.parametrize("count", [700, 5000])
def test_padding_of_conversations_is_under_three_percent(capacity, count):
    lengths = conversations(count)
    for epoch in range(2):
        packed = pack_epoch(lengths, shards_of(count), capacity, np.random.default_rng(epoch))
        assert padding_share(lengths, packed, capacity) < 0.03


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("count", [5, 700])
def test_every_sample_is_once_in_an_epoch_and_ranks_have_equal_steps(ranks, count):
    lengths = conversations(count)
    packed = pack_epoch(lengths, shards_of(count), 1024, np.random.default_rng(0), ranks)
    assert sorted(member for s in packed for member in s) == list(range(count))
    assert all(lengths[s].sum() <= 1024 for s in packed)
    assert len(packed) % ranks == 0


def test_the_order_is_that_of_its_seed_and_shards_are_read_together():
    lengths = conversations(6000)
    shards = shards_of(6000, 32)
    first, again, other = (
        pack_epoch(lengths, shards, 1024, np.random.default_rng([0, epoch])) for epoch in (0, 0, 1)
    )
    assert first == again != other
    assert {tuple(s) for s in first} != {tuple(s) for s in other}
    # A shard's samples lie within two windows of each other, far from the whole epoch.
    places = {}
    for number, sequence in enumerate(first):
        for member in sequence:
            places.setdefault(shards[member], []).append(number)
    spread = [max(p) - min(p) for p in places.values()]
    assert np.median(spread) < 1.5 * WINDOW_SEQUENCES
    assert len(first) > 10 * WINDOW_SEQUENCES
    # And shards come in another order than they lie in.
    starts = [min(places[s]) for s in range(len(places))]
    assert abs(np.corrcoef(starts, range(len(starts)))[0, 1]) < 0.4


def test_validation_has_the_order_given():
    lengths = conversations(300)
    packed = pack_epoch(lengths, shards_of(300), 1024, None)
    assert packed == pack_epoch(lengths, shards_of(300), 1024, None)
    assert sorted(m for s in packed for m in s) == list(range(300))
