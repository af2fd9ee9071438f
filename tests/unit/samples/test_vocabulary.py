import numpy as np
import pytest

from aerie.common.errors import InputError
from aerie.samples.file import TokenizedSample
from aerie.samples.vocabulary import build_maps, count_tokens, describe_coverage


def sample(ids, mask, following=-1):
    return TokenizedSample("r", "r", "s", "train", ids, mask, 0, following)


def test_supervised_tokens_and_the_next_token_are_counted():
    samples = [
        sample([5, 6, 7, 7], [False, True, True, True], following=2),
        sample([1, 2], [False, False]),
    ]
    assert count_tokens(samples, 10).tolist() == [0, 0, 1, 0, 0, 0, 1, 2, 0, 0]


def test_next_token_counts_only_after_supervised_text():
    assert count_tokens([sample([5, 6], [True, False], following=2)], 10).sum() == 1


def test_id_outside_the_vocabulary_is_named_in_the_error():
    with pytest.raises(InputError, match="token id 12"):
        count_tokens([sample([5, 12], [True, True])], 10)


def test_maps_follow_the_published_convention():
    # Hand-computed: tokens 1, 3, 4 are the most frequent; d2t[i] = target id - i.
    t2d, d2t = build_maps(np.array([0, 9, 1, 7, 7, 0]), 3)
    assert t2d.tolist() == [False, True, False, True, True, False]
    assert t2d.dtype == bool
    assert d2t.tolist() == [1 - 0, 3 - 1, 4 - 2]
    assert d2t.dtype == np.int64
    assert (np.arange(3) + d2t).tolist() == np.flatnonzero(t2d).tolist()


def test_ties_and_unseen_tokens_go_to_the_lower_id():
    t2d, _ = build_maps(np.array([0, 0, 5, 0]), 3)
    assert t2d.tolist() == [True, True, True, False]


def test_draft_vocabulary_larger_than_the_models_is_refused():
    with pytest.raises(InputError, match="larger than the model's vocabulary of 4"):
        build_maps(np.zeros(4, int), 5)


def test_coverage_matches_hand_calculation():
    counts = np.array([0, 6, 1, 3, 0, 0])
    found = describe_coverage(counts, 2, tokenizer_size=5, tokenizer="t")
    assert found.covered == pytest.approx(0.9)
    assert (found.seen, found.unseen, found.padded) == (3, 0, 0)
    wide = describe_coverage(counts, 6, tokenizer_size=5, tokenizer="t")
    assert (wide.covered, wide.unseen, wide.padded) == (1.0, 3, 1)
