"""Roles, content, reasoning, tool calls."""

import json

import pytest

from aerie.common.errors import InputError
from aerie.corpus.conversations import to_conversation
from aerie.corpus.unusable import Unusable
from support.corpus import BOT, USER, json_lines, read, short, turns_of


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *[(n, "user") for n in ("human", "user", "USER", "prompter", "Human", " user ")],
        *[(n, "assistant") for n in ("gpt", "GPT", "assistant", "ASSISTANT", "bot", "model")],
        *[(n, "system") for n in ("system", "developer")],
        *[(n, "tool") for n in ("tool", "observation", "function", "ipython")],
    ],
)
def test_role_names(name, role):
    message = to_conversation([{"from": name, "value": "x"}])[1][0]
    assert message == {"role": role, "content": "x"}


def test_unknown_role_stops_or_is_dropped_or_mapped(tmp_path):
    odd = [USER, {"role": "my-model-7b", "content": "A"}]
    path = json_lines(tmp_path / "x.jsonl", [[USER, BOT], odd])
    with pytest.raises(InputError, match=r"line 2: unknown role.*'my-model-7b'.*corpus\.roles"):
        read(path)
    records, tally = read(path, on_unknown_role="drop")
    assert len(records) == 1 and tally.dropped == {"unknown role": 1}
    records, _ = read(path, roles={"my-model-7b": "assistant"})
    assert short(records[1]["messages"]) == ["u:Q", "a:A"]


def test_parts_equal_text():
    parts = [{"type": "text", "text": "What "}, {"type": "text", "value": "now?"}]
    assert turns_of([{"role": "user", "content": parts}]) == ["u:What now?"]


@pytest.mark.parametrize(
    "record",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        {"images": ["x.png"], "messages": [USER, BOT]},
    ],
)
def test_images_are_not_text(record):
    with pytest.raises(Unusable, match="not text"):
        to_conversation(record)


def test_reasoning_from_key_and_from_part():
    part = {"role": "assistant", "content": [{"type": "reasoning", "value": "hm"}, "A"]}
    key = {"role": "assistant", "content": "A", "reasoning_content": "hm"}
    for turn in (part, key):
        expected = {"role": "assistant", "content": "A", "reasoning_content": "hm"}
        assert to_conversation([USER, turn])[1][1] == expected


CALL = {"name": "f", "arguments": {"a": 1}}


CALLS = [
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
    {"role": "assistant", "content": None, "function_call": CALL},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL)}]},
]


@pytest.mark.parametrize("turn", CALLS)
def test_tool_calls_have_one_form(turn):
    expected = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    }
    assert to_conversation([USER, turn])[1][1] == expected


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "f", "parameters": {}}],
        [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        json.dumps([{"name": "f", "parameters": {}}]),
    ],
)
def test_tools_have_one_form(tools):
    expected = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert to_conversation({"messages": [USER, BOT], "tools": tools})[2] == expected


@pytest.mark.parametrize(
    "arguments", ['{"a": 1', "[1]", '{"a": NaN}', '{"a":' * 99 + "1" + "}" * 99]
)
def test_malformed_tool_call_is_dropped_with_its_place(tmp_path, arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    records, tally = read(json_lines(tmp_path / "x.jsonl", [[USER, BOT], turns]))
    assert len(records) == 1
    example = tally.examples["malformed tool call"][0]
    assert example["file"].endswith("x.jsonl") and example["place"] == "line 2"
    assert "the arguments of 'f' in turn 2" in example["detail"]


def test_tool_turn_keeps_its_name_and_call_id():
    turn = {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c1", "extra": 3}
    expected = {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c1"}
    assert to_conversation([USER, turn])[1][1] == expected
