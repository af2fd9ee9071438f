import shutil
import sys

import numpy as np
import pytest

import tokenize_samples
from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.common.files import read_json, write_json, write_json_lines
from aerie.samples.tokenize import (
    Counts,
    Dropped,
    TokenizedSample,
    describe_shard,
    read_samples,
    rows_of_answer,
    rows_of_conversation,
    summarize,
    write_samples,
)

LIMITS = {"max_length": 64, "min_supervised_tokens": 3}
RECORD = {"id": "r", "source": "s", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def template(tiny_verifier):
    return ChatTemplate.load(tiny_verifier)


def answer(ids, *spans):
    return {"id": "r", "samples": [{"ids": ids, "spans": [list(s) for s in spans]}]}


def test_a_generated_answer_s_last_token_is_beside_the_row():
    # Prompt 10 11 12, answer 20 21 22 2: the last was never an input, so it has no state.
    (row,) = rows_of_answer(RECORD, "train", answer([10, 11, 12, 20, 21, 22, 2], (3, 7)), LIMITS)
    assert row.input_ids == [10, 11, 12, 20, 21, 22]
    assert row.loss_mask == [False, False, False, True, True, True]
    assert (row.last_turn, row.next_token) == (3, 2)


def test_every_answer_of_a_conversation_is_supervised():
    found = answer([1, 20, 21, 2, 9, 9, 30, 31, 2], (1, 4), (6, 9))
    (row,) = rows_of_answer(RECORD, "train", found, LIMITS)
    assert row.loss_mask == [False, True, True, True, False, False, True, True]
    assert row.last_turn == 6


def test_too_short_and_unanswered_records_are_dropped_with_a_reason():
    with pytest.raises(Dropped, match="too few supervised tokens"):
        rows_of_answer(RECORD, "train", answer([1, 2, 3, 4], (2, 4)), LIMITS)
    with pytest.raises(Dropped, match="prompt fills the window"):
        rows_of_answer(RECORD, "train", {"id": "r", "dropped": "prompt fills the window"}, LIMITS)


def test_a_template_that_starts_anew_gives_a_sample_a_turn():
    found = {
        "id": "r",
        "samples": [
            {"ids": [1, 20, 21, 22, 2], "spans": [[1, 5]]},
            {"ids": [1, 7, 7, 30, 31, 32, 2], "spans": [[3, 7]]},
        ],
    }
    rows = rows_of_answer(RECORD, "heldout", found, LIMITS)
    assert [r.id for r in rows] == ["r", "r-1"]
    assert {r.record for r in rows} == {"r"}


def conversation(text):
    return {
        "id": "r",
        "source": "s",
        "messages": [
            {"role": "user", "content": "count apples"},
            {"role": "assistant", "content": text},
        ],
    }


def test_a_kept_answer_is_supervised_and_nothing_else(template):
    text = "the children count and write letters"
    (row,) = rows_of_conversation(conversation(text), "train", template, LIMITS)
    ids = [i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
    assert template.decode(ids).strip() == text
    rest = [i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if not m]
    assert "children" not in template.decode(rest)


def test_a_kept_answer_that_begins_behind_the_window_is_dropped(template):
    record = conversation("a plan")
    record["messages"][0]["content"] = "apples and " * 80
    with pytest.raises(Dropped, match="prompt fills the window"):
        rows_of_conversation(record, "train", template, LIMITS)


def test_a_kept_answer_is_cut_at_the_window(template):
    record = conversation("letters about trains " * 60)
    (row,) = rows_of_conversation(record, "train", template, LIMITS)
    assert len(row.input_ids) == 64
    assert row.next_token >= 0


def test_rows_survive_the_file(tmp_path):
    rows = rows_of_answer(RECORD, "train", answer([10, 20, 21, 22, 2], (1, 5)), LIMITS)
    write_samples(tmp_path / "x.parquet", rows)
    assert read_samples(tmp_path / "x.parquet") == {"r": rows[0]}


def test_a_flipped_bit_in_the_file_is_never_read_as_another_sample(tmp_path):
    path = tmp_path / "samples.parquet"
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 50_000, 200).tolist()
    mask = (generator.random(200) < 0.5).tolist()
    row = TokenizedSample("r", "r", "s", "train", ids, mask, 1, 2)
    write_samples(path, [row])
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        try:
            found = read_samples(path)
        except InputError:
            continue
        assert found == {"r": row}, place


def test_a_shard_s_name_follows_its_tokens_and_their_order():
    rows = rows_of_answer(RECORD, "train", answer([10, 20, 21, 22, 2], (1, 5)), LIMITS)
    other = rows_of_answer(RECORD, "train", answer([11, 20, 21, 22, 2], (1, 5)), LIMITS)
    names = {
        describe_shard("train", part)["id"] for part in (rows, other, rows + other, other + rows)
    }
    assert len(names) == 4
    assert describe_shard("train", rows + other)["tokens"] == 8


def test_reasons_are_counted_with_three_examples():
    counts = Counts()
    for number in range(5):
        counts.drop(f"r{number}", "too short")
    report = counts.report()
    assert report["dropped"] == {"too short": 5}
    assert report["examples"]["too short"] == ["r0", "r1", "r2"]


def test_the_summary_by_hand():
    rows = rows_of_answer(RECORD, "train", answer([10, 20, 21, 22, 2], (1, 5)), LIMITS)
    found = summarize(rows)
    assert (found["samples"], found["tokens"], found["supervised_tokens"]) == (1, 4, 3)
    assert found["supervised_share"] == pytest.approx(0.75)
    assert found["length"]["max"] == 4


# The program, in mode keep.

STRICT = """{{% for m in messages %}}{{% if m.role == 'system' %}}
{{{{ raise_exception('no system here') }}}}{{% endif %}}{{% endfor %}}{}"""


@pytest.fixture
def tokenize(tmp_path, tiny_verifier, monkeypatch):
    """Run the program on conversations, with a template that refuses system turns; the report."""
    folder = tmp_path / "verifier"
    shutil.copytree(tiny_verifier, folder)
    plain = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(STRICT.format(plain))

    def run(conversations, **options):
        records = [
            {"id": f"{i:032x}", "source": "s", "messages": messages}
            for i, messages in enumerate(conversations)
        ]
        write_json_lines(tmp_path / "train.jsonl.zst", records)
        write_json_lines(tmp_path / "heldout.jsonl.zst", [])
        write_json(tmp_path / "verifier.json", {"path": str(folder), "fingerprint": "f" * 32})
        given = {
            "train": tmp_path / "train.jsonl.zst",
            "heldout": tmp_path / "heldout.jsonl.zst",
            "verifier": tmp_path / "verifier.json",
            "store": tmp_path / "store",
            "max-length": 64,
            "min-supervised-tokens": 1,
            "min-kept-share": 0.5,
            "max-lost-share": 0.5,
            "samples-per-shard": 16,
            "last-state": "all",
            "samples": tmp_path / "samples.parquet",
            "shards": tmp_path / "shards.json",
            "report": tmp_path / "report.json",
            **options,
        }
        monkeypatch.setattr(sys, "argv", ["x", *(f"--{k}={v}" for k, v in given.items())])
        tokenize_samples.main()
        return read_json(tmp_path / "report.json")

    return run


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


REFUSED = [{"role": "system", "content": "S"}, *turns("q", "a")]
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
LOST = [*turns("q"), {"role": "assistant", "content": "a", "tool_calls": [CALL]}]


def test_a_record_that_the_template_refuses_is_counted(tokenize):
    report = tokenize([turns("q", "a"), turns("r", "b"), REFUSED])
    assert (report["records_in"], report["records_kept"]) == (3, 2)
    (reason,) = report["dropped"]
    assert "no system here" in reason and report["dropped"][reason] == 1
    assert report["examples"][reason] == [f"{2:032x}"]
    with pytest.raises(InputError, match="of 3 records only 2 became samples"):
        tokenize([turns("q", "a"), turns("r", "b"), REFUSED], **{"min-kept-share": 0.9})


def test_groups_with_the_same_tokens_are_one_shard_and_the_others_are_counted(tokenize, tmp_path):
    """Such as records of one first turn with `generation.first_turn_only`."""
    same = turns("q", "a")
    options = {"samples-per-shard": 1, "min-kept-share": 0.1}
    report = tokenize([same, turns("r", "b"), same, same], **options)
    (reason,) = report["dropped"]
    assert "the same tokens" in reason
    assert (report["records_in"], report["records_kept"]) == (4, 2)
    assert report["dropped"][reason] == 2
    shards = read_json(tmp_path / "shards.json")["shards"]
    assert len({s["id"] for s in shards}) == len(shards) == 2
    assert set(read_samples(tmp_path / "samples.parquet")) == {
        i for s in shards for i in s["samples"]
    }


def test_no_sample_at_all_is_an_error_whatever_the_floor(tokenize):
    with pytest.raises(InputError, match="of 1 records only 0 became samples"):
        tokenize([REFUSED], **{"min-kept-share": 0})


def test_what_the_template_loses_is_counted_and_stops_above_the_share(tokenize):
    report = tokenize([turns("q", "a"), LOST])
    assert report["lost_by_template"] == {"tool_calls": 1}
    assert report["examples"]["the template loses: tool_calls"] == [f"{1:032x}"]
    with pytest.raises(InputError, match=r"loses something of 1 of 2 .*samples\.max_lost_share"):
        tokenize([turns("q", "a"), LOST], **{"max-lost-share": 0.4})
