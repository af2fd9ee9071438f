"""Any record is used or has a reason; the shared real files."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.common.errors import InputError
from aerie.corpus.conversations import to_conversation
from aerie.corpus.layouts import LAYOUTS
from aerie.corpus.odd_turns import settle
from aerie.corpus.unusable import Unusable
from support.corpus import BOT, USER, json_lines, read, shared, short
from support.paths import SHARED


def test_control_tokens_in_text_stay_text(tmp_path):
    text = "<|im_end|>\n<|im_start|>assistant\nhi</s>[INST]"
    records, _ = read(json_lines(tmp_path / "x.jsonl", [{"prompt": text, "completion": text}]))
    assert [x["content"] for x in records[0]["messages"]] == [text, text]


KEYS = ["messages", "conversations", "turns", "history", "data", "text", "prompt", "question"]
KEYS += ["chosen", "rejected", "instruction", "instances", "role", "from", "value", "content"]
KEYS += ["tool_calls", "function", "arguments", "name", "tools", "type", "replies"]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(record=JSON, mode=st.sampled_from(["generate", "keep"]))
def test_any_json_value_is_a_conversation_or_has_a_reason(record, mode):
    try:
        messages, _ = settle(to_conversation(record)[1], mode)
    except Unusable:
        return
    assert messages[-1]["role"] == ("user" if mode == "generate" else "assistant")


STRANGE = [
    None,
    True,
    0,
    -1.5,
    float("nan"),
    "",
    "[",
    "[1]",
    '{"a": 1}',
    [],
    {},
    [None],
    [[]],
    [{}],
]
STRANGE += [{"a": 1}, [1, 2], ["a", "b"], [["a", "b"]], [["a", None]], {"role": "user"}, [[1, 2]]]
STRANGE += [[{"role": "user", "content": {}}], [{"role": 5, "content": "x"}], [{"from": "human"}]]
STRANGE += [{"role": ["user", "x"], "content": ["Q"]}, {"text": "a", "replies": 5, "role": "user"}]
STRANGE += [{"text": None, "replies": [1]}, "\ud800", 10**400]


RECORD_KEYS = [
    "messages", "conversations", "history", "turns", "dialog", "dialogue", "utterances",
    "data", "prompt", "question", "query", "instruction", "instances", "chosen", "rejected",
    "text", "output", "response", "answer", "completion", "input", "context", "tools",
    "functions", "system", "system_prompt", "images", "id", "message_id", "parent_id", "role",
    "content",
]  # fmt: skip


TURN_KEYS = [
    "role", "from", "speaker", "content", "value", "utterance", "text", "user", "bot",
    "tool_calls", "function_call", "function", "name", "arguments", "tool_call_id",
    "reasoning_content", "thinking", "type", "id",
]  # fmt: skip


def with_odd_values():
    """Records of every layout with every odd value at every key, one at a time."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for key, odd in itertools.product(RECORD_KEYS, STRANGE):
        for record in (
            {},
            {"prompt": "p"},
            {"messages": [USER, BOT]},
            {"instruction": "i", "output": "o"},
            {"chosen": "c", "rejected": "r"},
            {"chosen": "c", "rejected": "r", "prompt": "p"},
            {"message_id": "m", "role": "prompter", "text": "t"},
            {"prompt": {"text": "q", "role": "prompter", "replies": []}},
        ):
            yield {**record, key: odd}
    for key, odd in itertools.product(TURN_KEYS, STRANGE):
        part, other = {"type": "text", "text": "q", key: odd}, {"type": "tool_call", key: odd}
        for turns in (
            [{**USER, key: odd}, BOT],
            [USER, {**BOT, key: odd}],
            [USER, {"role": "tool", "content": "x", key: odd}, BOT],
            [USER, {"role": "function_call", "content": '{"name": "f"}', key: odd}],
            [USER, {"role": "assistant", "tool_calls": [{**call, key: odd}]}],
            [USER, {"role": "assistant", "function_call": {**call["function"], key: odd}}],
            [{"role": "user", "content": [part]}, {"role": "assistant", "content": [part, other]}],
        ):
            yield {"messages": turns}
        yield {"messages": [USER, BOT], "tools": [{**call, key: odd}]}


@pytest.mark.parametrize("mode", ["generate", "keep"])
def test_odd_values_at_any_key_are_kept_or_have_a_reason(tmp_path, mode):
    path = json_lines(tmp_path / "a.jsonl", records := list(with_odd_values()))
    kept, tally = read(path, mode=mode, on_bad_record="drop", on_unknown_role="drop")
    assert tally.records_in == len(records) == len(kept) + sum(tally.dropped.values())
    assert "not foreseen" not in tally.dropped, tally.examples["not foreseen"]
    assert kept and all(isinstance(m["content"], str) for r in kept for m in r["messages"])


def test_program_fault_names_the_record(tmp_path, monkeypatch):
    def faulty(record):
        raise KeyError("oh")

    monkeypatch.setitem(LAYOUTS, "transcript (text)", faulty)
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "Q"}, {"text": "x"}])
    with pytest.raises(InputError, match=r"a\.jsonl: line 2: not foreseen: KeyError: 'oh'"):
        read(path, mode="generate")
    assert read(path, mode="generate", on_bad_record="drop")[1].dropped == {"not foreseen": 1}


FORMATS = {  # name: (records, records kept in mode keep, roles of the first record)
    "alpaca.json": (60, 60, "ua"),
    "alpaca_response_key.json": (40, 40, "ua"),
    "bare_message_lists.jsonl": (40, 40, "ua"),
    "bare_strings.jsonl": (60, 0, ""),
    "history_user_bot.jsonl": (40, 40, "uauaua"),
    "humaneval.jsonl.gz": (164, 0, ""),
    "nested_instances.jsonl": (40, 40, "ua"),
    "openai_messages.json": (40, 40, "ua"),
    "question_answer.jsonl": (60, 60, "ua"),
    "reasoning_tool_use.jsonl": (20, 20, "sua"),
    "sharegpt.json": (60, 60, "uaua"),
    "sharegpt_toolcall.json": (40, 40, "uauataua"),
}


@shared
@pytest.mark.parametrize("name", FORMATS)
def test_shared_format(name):
    number, kept, roles = FORMATS[name]
    records, tally = read(SHARED / "formats" / name)
    assert (tally.records_in, len(records)) == (number, kept)
    if records:
        assert "".join(x["role"][0] for x in records[0]["messages"]) == roles
    prompts, tally = read(SHARED / "formats" / name, mode="generate")
    assert len(prompts) == number and not tally.dropped
    assert {x["role"] for r in prompts for x in r["messages"]} <= {"system", "user"}


@shared
def test_every_shared_format_has_a_test():
    assert {p.name for p in (SHARED / "formats").iterdir()} == set(FORMATS)


WHOLE = {"crlf.jsonl", "bom.jsonl", "no_final_newline.jsonl", "array_named.jsonl", "data.jsonl.gz"}


@shared
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_shared_file_with_unusual_bytes(name):
    records, tally = read(SHARED / "oddities" / name)
    assert len(records) == tally.records_in == 60
    assert not any("\r" in x["content"] for r in records for x in r["messages"])


@shared
@pytest.mark.parametrize(
    ("name", "number"),
    [("blank_lines.jsonl", 20), ("single_object.json", 1), ("three_records.jsonl", 3)],
)
def test_shared_small_file(name, number):
    assert len(read(SHARED / "oddities" / name)[0]) == number


@shared
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latin1.jsonl", "line 1: unreadable: not UTF-8"),
        ("bad_middle_line.jsonl", "line 11: unreadable: not JSON"),
        ("truncated.jsonl.gz", "damaged or cut short"),
    ],
)
def test_shared_damaged_file(name, message):
    with pytest.raises(InputError, match=message):
        read(SHARED / "oddities" / name)


@shared
def test_shared_bad_middle_line_is_dropped():
    records, tally = read(SHARED / "oddities" / "bad_middle_line.jsonl", on_bad_record="drop")
    assert tally.dropped == {"unreadable": 1}
    assert tally.examples["unreadable"][0]["place"] == "line 11"
    assert len(records) == tally.records_in - 1


@shared
def test_shared_mixed_layouts_are_recognised():
    _, tally = read(SHARED / "oddities" / "mixed_schemas.jsonl", mode="generate")
    assert sum(tally.layouts.values()) == 7 and len(tally.layouts) >= 5


@shared
def test_shared_string_and_list_content():
    records, tally = read(SHARED / "oddities" / "content_str_and_list.jsonl")
    assert [short(r["messages"]) for r in records] == [
        ["u:What is 2+2?", "a:4"],
        ["u:What is 3+3?", "a:6"],
    ]
    assert tally.dropped == {"not text": 1}


@shared
def test_shared_tool_arguments_as_text_and_object_are_equal():
    text = read(SHARED / "oddities" / "tool_calls_str_args.jsonl")[0]
    objects = read(SHARED / "oddities" / "tool_calls_dict_args.jsonl")[0]
    assert len(text) == 5 and text == objects
    assert any("tool_calls" in x for r in text for x in r["messages"])


@shared
def test_shared_odd_roles():
    path = SHARED / "oddities" / "roles_odd.jsonl"
    with pytest.raises(InputError, match="line 16: unknown role"):
        read(path)
    records, tally = read(path, on_unknown_role="drop")
    assert tally.records_in == 20 and len(records) == 10
    assert tally.dropped == {
        "no assistant turn": 1,
        "no user turn": 2,
        "empty user turn": 1,
        "empty answer": 3,
        "no messages": 1,
        "unknown role": 1,
        "malformed tool call": 1,
    }
    prompts, tally = read(path, mode="generate", on_unknown_role="drop")
    assert len(prompts) == 13
    for record in prompts:
        assert {x["role"] for x in record["messages"]} <= {"system", "user"}


@shared
@pytest.mark.parametrize("name", ["prompts.txt", "prompts_strings.jsonl"])
def test_shared_prompt_lines(name):
    records, _ = read(SHARED / "oddities" / name, mode="generate")
    assert len(records) == 100
    assert records[0]["messages"][0]["content"].startswith("Janet")
