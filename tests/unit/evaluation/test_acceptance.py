import pytest

from aerie.common.errors import InputError
from aerie.evaluation.acceptance import count_acceptance
from aerie.evaluation.results import PromptSetAcceptance


def counters(drafts, accepted, per_position):
    return {
        "num_drafts": drafts,
        "num_accepted_tokens": accepted,
        "per_position": per_position,
    }


def count(before, after):
    return count_acceptance(before, after, positions=3, prompts=7, generated_tokens=30)


def test_acceptance_agrees_with_counting_by_hand():
    # 10 drafts of 3: the first token accepted 6 times, the second 3, the third once.
    assert count(counters(5, 4, [3, 1, 0]), counters(15, 14, [9, 4, 1])) == PromptSetAcceptance(
        acceptance_length=2.0,
        acceptance_per_position=[0.6, 0.3, 0.1],
        num_drafts=10,
        num_accepted_tokens=10,
        prompts=7,
        generated_tokens=30,
    )


def test_the_first_reading_may_be_empty():
    assert count(counters(0, 0, []), counters(2, 1, [1, 0, 0])).acceptance_length == 1.5


def test_no_drafts_is_an_error_and_not_a_division_by_zero():
    with pytest.raises(InputError, match="drafted nothing"):
        count(counters(3, 1, [1, 0, 0]), counters(3, 1, [1, 0, 0]))
