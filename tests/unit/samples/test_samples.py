import numpy as np
import pytest

from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.config import Samples
from aerie.samples.conversion import Dropped, sample_of_conversation, samples_of_answer
from aerie.samples.counting import RecordCounter, summarize
from aerie.samples.file import TokenizedSample, read_samples, write_samples
from aerie.samples.shards import plan_shard
from aerie.samples.stored_answer import AnswerTokens, StoredAnswer

SETTINGS = Samples(max_length=64, min_supervised_tokens=3)
RECORD = {"id": "r", "source": "s", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def template(tiny_verifier):
    return ChatTemplate.load(tiny_verifier)


def answer(ids, *spans):
    return StoredAnswer(id="r", samples=[AnswerTokens(ids=ids, spans=spans)])


def test_last_token_of_an_answer_becomes_next_token():
    # Prompt 10 11 12, answer 20 21 22 2: the last was never an input, so it has no state.
    (sample,) = samples_of_answer(
        RECORD, "train", answer([10, 11, 12, 20, 21, 22, 2], (3, 7)), SETTINGS
    )
    assert sample.input_ids == [10, 11, 12, 20, 21, 22]
    assert sample.loss_mask == [False, False, False, True, True, True]
    assert (sample.last_turn, sample.next_token) == (3, 2)


def test_every_answer_of_a_conversation_is_supervised():
    found = answer([1, 20, 21, 2, 9, 9, 30, 31, 2], (1, 4), (6, 9))
    (sample,) = samples_of_answer(RECORD, "train", found, SETTINGS)
    assert sample.loss_mask == [False, True, True, True, False, False, True, True]
    assert sample.last_turn == 6


def test_short_and_unanswered_records_are_dropped_with_a_reason():
    with pytest.raises(Dropped, match="too few supervised tokens"):
        samples_of_answer(RECORD, "train", answer([1, 2, 3, 4], (2, 4)), SETTINGS)
    with pytest.raises(Dropped, match="prompt fills the window"):
        samples_of_answer(
            RECORD, "train", StoredAnswer(id="r", dropped="prompt fills the window"), SETTINGS
        )


def test_template_that_renders_turns_anew_gives_one_sample_per_turn():
    found = StoredAnswer(
        id="r",
        samples=[
            AnswerTokens(ids=[1, 20, 21, 22, 2], spans=[(1, 5)]),
            AnswerTokens(ids=[1, 7, 7, 30, 31, 32, 2], spans=[(3, 7)]),
        ],
    )
    samples = samples_of_answer(RECORD, "heldout", found, SETTINGS)
    assert [s.id for s in samples] == ["r", "r-1"]
    assert {s.record for s in samples} == {"r"}


def conversation(text):
    return {
        "id": "r",
        "source": "s",
        "messages": [
            {"role": "user", "content": "count apples"},
            {"role": "assistant", "content": text},
        ],
    }


def test_only_the_kept_answer_is_supervised(template):
    text = "the children count and write letters"
    sample = sample_of_conversation(conversation(text), "train", template, SETTINGS)
    ids = [i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m]
    assert template.decode(ids).strip() == text
    rest = [i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if not m]
    assert "children" not in template.decode(rest)


def test_kept_answer_beyond_the_window_is_dropped(template):
    record = conversation("a plan")
    record["messages"][0]["content"] = "apples and " * 80
    with pytest.raises(Dropped, match="prompt fills the window"):
        sample_of_conversation(record, "train", template, SETTINGS)


def test_kept_answer_is_cut_at_the_window(template):
    record = conversation("letters about trains " * 60)
    sample = sample_of_conversation(record, "train", template, SETTINGS)
    assert len(sample.input_ids) == 64
    assert sample.next_token >= 0


def test_written_samples_are_read_back(tmp_path):
    samples = samples_of_answer(RECORD, "train", answer([10, 20, 21, 22, 2], (1, 5)), SETTINGS)
    write_samples(tmp_path / "x.parquet", samples)
    assert read_samples(tmp_path / "x.parquet") == {"r": samples[0]}


def test_flipped_bit_is_never_read_as_another_sample(tmp_path):
    path = tmp_path / "samples.parquet"
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 50_000, 200).tolist()
    mask = (generator.random(200) < 0.5).tolist()
    sample = TokenizedSample("r", "r", "s", "train", ids, mask, 1, 2)
    write_samples(path, [sample])
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        try:
            found = read_samples(path)
        except InputError:
            continue
        assert found == {"r": sample}, place


def test_shard_id_depends_on_tokens_and_their_order():
    samples = samples_of_answer(RECORD, "train", answer([10, 20, 21, 22, 2], (1, 5)), SETTINGS)
    other = samples_of_answer(RECORD, "train", answer([11, 20, 21, 22, 2], (1, 5)), SETTINGS)
    names = {
        plan_shard("train", part).id for part in (samples, other, samples + other, other + samples)
    }
    assert len(names) == 4
    assert plan_shard("train", samples + other).tokens == 8


def test_reasons_are_counted_with_three_examples():
    tally = RecordCounter()
    for number in range(5):
        tally.drop(f"r{number}", "too short")
    report = tally.report([], 0)
    assert report.dropped == {"too short": 5}
    assert report.examples["too short"] == ["r0", "r1", "r2"]


def test_summary_matches_hand_calculation():
    samples = samples_of_answer(RECORD, "train", answer([10, 20, 21, 22, 2], (1, 5)), SETTINGS)
    found = summarize(samples)
    assert (found.samples, found.tokens, found.supervised_tokens) == (1, 4, 3)
    assert found.supervised_share == pytest.approx(0.75)
    assert found.length["max"] == 4
