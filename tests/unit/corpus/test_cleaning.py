"""Duplicates, near duplicates, decontamination and the held-out side."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aerie.common.files import digest
from aerie.corpus.cleaning import (
    Contamination,
    characters,
    duplicate_key,
    heldout_border,
    near_duplicates,
    prompt_hash,
    sampled,
    signature,
)


def record(*texts, system=None):
    """User and assistant alternating."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {"id": digest(messages, []), "source": "x", "messages": messages}


def test_duplicate_key_ignores_white_space_around_texts_only():
    assert duplicate_key(record("a b", "c")) == duplicate_key(record("a b \n", " c"))
    assert duplicate_key(record("a b", "c")) != duplicate_key(record("a  b", "c"))
    assert duplicate_key(record("a b", "c")) != duplicate_key(record("a b"))


def test_prompt_hash_ignores_case_and_white_space():
    same = [record("What  is\nthis?"), record("what is THIS? "), record("What is this?", "x")]
    assert len({prompt_hash(r) for r in same}) == 1
    assert prompt_hash(record("What is this")) != prompt_hash(same[0])


def test_prompt_hash_has_a_fixed_value():
    # `printf hi | b2sum -l 64`: a change moves every user's prompts between the sides.
    assert prompt_hash(record("Hi")) == 0x106BCE4401410416


@given(st.sets(st.integers(0, 2**64 - 1), min_size=2), st.floats(0.001, 0.999))
def test_two_distinct_prompts_fill_both_sides(hashes, share):
    border, warning = heldout_border(list(hashes), share)
    heldout = [h for h in hashes if h < border]
    assert 0 < len(heldout) < len(hashes)
    if warning:
        assert "one prompt was moved there" in warning
        assert len(heldout) in (1, len(hashes) - 1)
    else:
        assert border == int(share * 2**64)


def test_single_prompt_is_trained_on_with_a_warning():
    border, warning = heldout_border([1, 1, 1], 0.5)
    assert border == 0 and "held-out set is empty" in warning


def test_heldout_share_is_met():
    hashes = [prompt_hash(record(f"prompt {i}")) for i in range(4000)]
    border, warning = heldout_border(hashes, 0.1)
    assert warning is None
    assert abs(sum(h < border for h in hashes) - 400) < 60


def test_prompts_keep_their_side_when_the_corpus_grows():
    hashes = [prompt_hash(record(f"prompt {i}")) for i in range(1000)]
    few, many = heldout_border(hashes[:200], 0.1)[0], heldout_border(hashes, 0.1)[0]
    assert [h < few for h in hashes[:200]] == [h < many for h in hashes[:200]]


def test_weight_chooses_a_stable_share():
    records = [record(f"prompt {i}") for i in range(2000)]
    half = {r["id"] for r in records if sampled(r, 0.5)}
    more = {r["id"] for r in records if sampled(r, 0.8)}
    assert abs(len(half) - 1000) < 100 and half < more
    assert all(sampled(r, 1.0) for r in records)


def test_characters_counts_all_texts():
    assert characters(record("ab", "cde", system="f")) == 6


WORDS = [f"word{i}" for i in range(60)]
LONG = " ".join(WORDS)


def test_contamination_by_13_words_in_a_row():
    known = Contamination()
    known.add("bench", record(LONG))
    shared = " ".join(WORDS[20:33])
    assert known.find(record(f"Please: {shared.upper()}!")) == ("bench", shared)
    assert known.find(record("Q", f"The answer is {shared}.")) == ("bench", shared)
    assert known.find(record(" ".join(WORDS[20:32]))) is None
    assert known.find(record("Q", system=LONG)) is None


def test_short_evaluation_prompt_must_be_a_whole_turn():
    known = Contamination()
    known.add("bench", record("Who are you?"))
    assert known.find(record("who are  you")) == ("bench", "who are you")
    assert known.find(record("Tell me: who are you?")) is None
    assert known.find(record("Q", "Who are you?")) is None


def changed(number):
    """60 words of which the last `number` are others."""
    return " ".join(WORDS[: 60 - number] + [f"other{i}" for i in range(number)])


def duplicates(records, threshold=0.8):
    return near_duplicates(np.stack([signature(r) for r in records]), threshold)


def test_near_duplicates_name_the_first():
    # 58 runs of three words; 3 words changed at the end leave 55 of 61 in common: 0.90;
    # 20 changed: 38 of 78 = 0.49
    records = [record(LONG), record("Something else entirely."), record(changed(3))]
    assert duplicates([*records, record(changed(20)), record(LONG + " !")]) == {2: 0, 4: 0}


def test_shared_system_text_makes_no_near_duplicates():
    assert duplicates([record(f"Question {i} of ours?", system=LONG) for i in range(5)]) == {}


def test_near_duplicates_of_short_and_wordless_texts():
    records = [record("hi"), record("hi"), record("yo"), record("?!"), record("?!"), record("…")]
    assert duplicates(records) == {1: 0, 4: 3}
