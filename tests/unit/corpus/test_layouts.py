"""Layouts and notes on what is not used."""

import json

import pytest

from aerie.common.errors import InputError
from aerie.corpus.conversations import to_conversation
from aerie.corpus.layouts import LAYOUTS
from aerie.corpus.unusable import Unusable
from support.corpus import BOT, USER, json_lines, read, short, turns_of

LAYOUT_CASES = {
    "bare string": ("Q", ["u:Q"]),
    "bare list": ([USER, BOT], ["u:Q", "a:A"]),
    "messages": ({"messages": [USER, BOT]}, ["u:Q", "a:A"]),
    "messages as text": ({"messages": json.dumps([USER, BOT])}, ["u:Q", "a:A"]),
    "messages as columns": (
        {"messages": {"role": ["user", "assistant"], "content": ["Q", "A"]}},
        ["u:Q", "a:A"],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        ["u:Q", "a:A"],
    ),
    "sharegpt with system": (
        {"system": "S", "conversations": [{"from": "human", "value": "Q"}]},
        ["s:S", "u:Q"],
    ),
    "alpaca": ({"instruction": "I", "input": "", "output": "O"}, ["u:I", "a:O"]),
    "alpaca input": ({"instruction": "I", "input": "X", "output": "O"}, ["u:I\n\nX", "a:O"]),
    "alpaca response": ({"instruction": "I", "input": "X", "response": "O"}, ["u:I\n\nX", "a:O"]),
    "alpaca with nan": ({"instruction": "I", "input": float("nan"), "output": "O"}, ["u:I", "a:O"]),
    "alpaca history": (
        {"instruction": "I2", "input": "", "output": "O2", "history": [["I1", "O1"]]},
        ["u:I1", "a:O1", "u:I2", "a:O2"],
    ),
    "dolly": ({"instruction": "I", "context": "C", "response": "R"}, ["u:I\n\nC", "a:R"]),
    "instances": (
        {"instruction": "I", "instances": [{"input": "X", "output": "O"}, {"output": "P"}]},
        ["u:I\n\nX", "a:O"],
    ),
    "question": ({"question": "Q", "answer": "A"}, ["u:Q", "a:A"]),
    "question, context": ({"question": "Q", "context": "C", "answer": "A"}, ["u:C\n\nQ", "a:A"]),
    "orca": ({"system_prompt": "S", "question": "Q", "response": "A"}, ["s:S", "u:Q", "a:A"]),
    "prompt": ({"category": "x", "prompt": "Q"}, ["u:Q"]),
    "prompt, completion": ({"prompt": "Q", "completion": "A"}, ["u:Q", "a:A"]),
    "prompt that looks like a list": ({"prompt": "[1, 2]"}, ["u:[1, 2]"]),
    "prompt of turns": ({"prompt": [USER], "completion": [BOT]}, ["u:Q", "a:A"]),
    "history": (
        {"history": [{"user": "Q", "bot": "A"}, {"user": "R", "bot": "B"}]},
        ["u:Q", "a:A", "u:R", "a:B"],
    ),
    "benchmark turns": ({"turns": ["Q", "R"]}, ["u:Q", "a:", "u:R", "a:"]),
    "alternating": ({"id": "0", "data": ["Q", "A", "R"]}, ["u:Q", "a:A", "u:R"]),
    "speakers": (
        {"turns": [{"speaker": "USER", "utterance": "Q"}, {"speaker": "SYSTEM", "utterance": "A"}]},
        ["u:Q", "a:A"],
    ),
    "preference texts": ({"prompt": "Q", "chosen": "A", "rejected": "B"}, ["u:Q", "a:A"]),
    "preference turns": (
        {"prompt": "Q", "chosen": [USER, BOT], "rejected": [USER, BOT]},
        ["u:Q", "a:A"],
    ),
    "preference answers": (
        {"prompt": [USER], "chosen": [BOT], "rejected": [BOT]},
        ["u:Q", "a:A"],
    ),
    "preference after turns": (
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
        ["u:Q", "a:A"],
    ),
    "preference transcript": (
        {"chosen": "\n\nHuman: Q\n\nAssistant: A", "rejected": "\n\nHuman: Q\n\nAssistant: B"},
        ["u:Q", "a:A"],
    ),
    "tree": (
        {
            "prompt": {
                "text": "Q",
                "role": "prompter",
                "replies": [
                    {"text": "worse", "role": "assistant", "rank": 1, "replies": []},
                    {
                        "text": "best",
                        "role": "assistant",
                        "rank": 0,
                        "replies": [{"text": "R", "role": "prompter", "replies": []}],
                    },
                    {"text": "gone", "role": "assistant", "rank": -1, "deleted": True},
                ],
            }
        },
        ["u:Q", "a:best", "u:R"],
    ),
    "flat tree": (
        {"message_id": "1", "parent_id": None, "role": "prompter", "text": "Q"},
        ["u:Q"],
    ),
    "transcript": ({"text": "Be kind. USER: Q ASSISTANT: A"}, ["s:Be kind.", "u:Q", "a:A"]),
    "guanaco": ({"text": "### Human: Q### Assistant: A"}, ["u:Q", "a:A"]),
    "arrow union": ({"conversations": None, "prompt": "Q", "messages": None}, ["u:Q"]),
}


@pytest.mark.parametrize("name", LAYOUT_CASES)
def test_layout_gives_its_turns(name):
    record, expected = LAYOUT_CASES[name]
    assert turns_of(record) == expected


def test_unknown_layout_names_found_keys_and_known_layouts(tmp_path):
    path = json_lines(tmp_path / "x.jsonl", [{"foo": 1, "bar": []}])
    with pytest.raises(InputError) as error:
        read(path)
    for text in ("x.jsonl: line 1", "foo (int), bar (list)", *LAYOUTS):
        assert text in str(error.value)


def test_text_alone_is_not_a_prompt():
    with pytest.raises(Unusable, match="unknown layout"):
        to_conversation({"text": "Once upon a time."})
    assert short(to_conversation({"text": "Why?"}, column="text")[1]) == ["u:Why?"]


def test_notes_say_what_is_not_used():
    assert to_conversation({"prompt": "Q", "chosen": "A", "rejected": "B"})[3] == [
        "rejected answer not used"
    ]
    many = {"instruction": "I", "instances": [{"output": "O"}, {"output": "P"}]}
    assert to_conversation(many)[3] == ["further instances not used"]
    answers = {"question": "Q", "answer": ["A", "B"]}
    assert to_conversation(answers)[3] == ["further answers not used"]
    system = {"messages": [{"role": "system", "content": "S"}, USER, BOT], "system": "S"}
    assert to_conversation(system)[3] == []
    note = "system text beside a system turn not used"
    assert to_conversation({**system, "system": "T"})[3] == [note]


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Q", "output": "A", "history": ["earlier", "turns"]},
        {"messages": [USER, BOT], "system": {"text": "S"}},
        {"messages": [USER, {**BOT, "reasoning_content": ["Because."]}]},
        {"prompt": {"text": "Q", "role": "prompter", "replies": ["A"]}},
    ],
)
def test_unknown_form_of_a_known_key_is_a_wrong_type(record):
    with pytest.raises(Unusable, match="wrong type"):
        to_conversation(record)
