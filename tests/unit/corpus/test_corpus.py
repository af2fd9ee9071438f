"""Layouts, roles, tool calls, odd turns: right values by hand, then the shared real files."""

import csv
import gzip
import itertools
import json

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.common.errors import InputError
from aerie.config import Corpus, Source
from aerie.corpus.layouts import LAYOUTS, Tally, Unusable, conversations, settle, to_conversation
from aerie.corpus.reading import read_records
from support.paths import SHARED

shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not there")


def short(messages):
    """Roles and texts as `u:…`, one a message; tool calls as `a!name`."""
    return [
        f"{m['role'][0]}:{m['content']}"
        + "".join(f"!{c['function']['name']}" for c in m.get("tool_calls", []))
        for m in messages
    ]


def turns_of(record):
    return short(to_conversation(record)[1])


def read(path, mode="keep", **settings):
    """Records, and the tally, of one file with the given `corpus` settings."""
    tally = Tally(str(path))
    source = Source(path=str(path))
    found = conversations(source, "test", Corpus(**settings), mode, tally)
    return [c.record for c in found], tally


def json_lines(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


# Layouts.

USER, BOT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}

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
def test_layout(name):
    record, expected = LAYOUT_CASES[name]
    assert turns_of(record) == expected


def test_no_layout_names_keys_found_and_layouts_expected(tmp_path):
    path = json_lines(tmp_path / "x.jsonl", [{"foo": 1, "bar": []}])
    with pytest.raises(InputError) as error:
        read(path)
    for text in ("x.jsonl: line 1", "foo (int), bar (list)", *LAYOUTS):
        assert text in str(error.value)


def test_text_of_a_document_is_not_taken_for_a_prompt():
    with pytest.raises(Unusable, match="unknown layout"):
        to_conversation({"text": "Once upon a time."})
    assert short(to_conversation({"text": "Why?"}, column="text")[1]) == ["u:Why?"]


def test_what_is_left_out_is_noted():
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


# Roles.


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *[(n, "user") for n in ("human", "user", "USER", "prompter", "Human", " user ")],
        *[(n, "assistant") for n in ("gpt", "GPT", "assistant", "ASSISTANT", "bot", "model")],
        *[(n, "system") for n in ("system", "developer")],
        *[(n, "tool") for n in ("tool", "observation", "function", "ipython")],
    ],
)
def test_role(name, role):
    message = to_conversation([{"from": name, "value": "x"}])[1][0]
    assert message == {"role": role, "content": "x"}


def test_unknown_role_stops_or_is_dropped_or_is_named(tmp_path):
    odd = [USER, {"role": "my-model-7b", "content": "A"}]
    path = json_lines(tmp_path / "x.jsonl", [[USER, BOT], odd])
    with pytest.raises(InputError, match=r"line 2: unknown role.*'my-model-7b'.*corpus\.roles"):
        read(path)
    records, tally = read(path, on_unknown_role="drop")
    assert len(records) == 1 and tally.dropped == {"unknown role": 1}
    records, _ = read(path, roles={"my-model-7b": "assistant"})
    assert short(records[1]["messages"]) == ["u:Q", "a:A"]


# Content, reasoning, tool calls.


def test_parts_and_text_are_the_same():
    parts = [{"type": "text", "text": "What "}, {"type": "text", "value": "now?"}]
    assert turns_of([{"role": "user", "content": parts}]) == ["u:What now?"]


@pytest.mark.parametrize(
    "record",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        {"images": ["x.png"], "messages": [USER, BOT]},
    ],
)
def test_image_is_refused_with_a_reason(record):
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
def test_tool_calls_come_out_in_one_form(turn):
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
def test_tools_come_out_in_one_form(tools):
    expected = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert to_conversation({"messages": [USER, BOT], "tools": tools})[2] == expected


@pytest.mark.parametrize(
    "arguments", ['{"a": 1', "[1]", '{"a": NaN}', '{"a":' * 99 + "1" + "}" * 99]
)
def test_malformed_tool_call_is_dropped_with_file_record_and_message(tmp_path, arguments):
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


# Odd turns: (turns given, what `generate` makes of them, what `keep` makes of them); a text
# stands for the reason for which the record is dropped.


def m(text):
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    message = {"role": roles[text[0]], "content": text[2:].partition("!")[0]}
    if "!" in text:
        name = text.partition("!")[2]
        function = {"name": name, "arguments": {}}
        message["tool_calls"] = [{"type": "function", "function": function}]
    return message


ODD = {
    "plain": ("u:1 a:2 u:3 a:4", "u:1 u:3", "u:1 a:2 u:3 a:4"),
    "system": ("s:S u:1 a:2", "s:S u:1", "s:S u:1 a:2"),
    "first turn by the assistant": ("a:hi u:1 a:2", "u:1", "u:1 a:2"),
    "two user turns": ("u:1 u:2 a:3", "u:1\n\n2", "u:1\n\n2 a:3"),
    "two answers": ("u:1 a:2 a:3", "u:1", "u:1 a:2\n\n3"),
    "last turn by the user": ("u:1 a:2 u:3", "u:1 u:3", "u:1 a:2"),
    "no answer": ("u:1", "u:1", "no assistant turn"),
    "only an answer": ("a:1", "no user turn", "no user turn"),
    "empty question": ("u: a:1", "empty user turn", "empty user turn"),
    "empty question later": ("u:1 a:2 u: a:3", "u:1", "u:1 a:2"),
    "empty answer": ("u:1 a:", "u:1", "empty answer"),
    "blank answer": ("u:1 a:\n\t", "u:1", "empty answer"),
    "empty answer later": ("u:1 a:2 u:3 a: u:5 a:6", "u:1 u:3 u:5", "u:1 a:2"),
    "tool call": ("u:1 a:!f t:2 a:3 u:4 a:5", "u:1", "u:1 a:!f t:2 a:3 u:4 a:5"),
    "tool call later": ("u:1 a:2 u:3 a:!f t:4", "u:1 u:3", "u:1 a:2 u:3 a:!f"),
    "tool result without a call": ("u:1 t:2 a:3", "u:1", "u:1 t:2 a:3"),
    "two calls": ("u:1 a:!f a:!g t:2", "u:1", "u:1 a:!f!g"),
    "text after a call": ("u:1 a:!f a:2", "u:1", "u:1 a:!f a:2"),
    "text before a call": ("u:1 a:2 a:!f", "u:1", "u:1 a:2!f"),
    "late system turn": ("u:1 s:S a:2", "system turn in the middle", "u:1 s:S a:2"),
    "system turn later": ("u:1 a:2 s:S u:3 a:4", "u:1", "u:1 a:2 s:S u:3 a:4"),
    "nothing": ("", "no messages", "no messages"),
}


@pytest.mark.parametrize("mode", ["generate", "keep"])
@pytest.mark.parametrize("name", ODD)
def test_odd_turns(name, mode):
    text, *expected = ODD[name]
    right = expected[mode == "keep"]
    messages = [m(part) for part in text.split(" ") if part]
    if right[1:2] != ":":
        with pytest.raises(Unusable) as error:
            settle(messages, mode)
        assert error.value.reason == right
    else:
        used = settle(messages, mode)[0]
        assert short(used) == right.split(" ")


def test_two_turns_are_joined_directly_at_white_space():
    messages = [m("u:1"), m("a:First half"), {"role": "assistant", "content": " and second."}]
    assert short(settle(messages, "keep")[0]) == ["u:1", "a:First half and second."]


def test_control_tokens_in_text_stay_text(tmp_path):
    text = "<|im_end|>\n<|im_start|>assistant\nhi</s>[INST]"
    records, _ = read(json_lines(tmp_path / "x.jsonl", [{"prompt": text, "completion": text}]))
    assert [x["content"] for x in records[0]["messages"]] == [text, text]


# Bytes → records.

TWO = [{"prompt": "Q\u2028é", "completion": "A"}, {"prompt": "R", "completion": "B"}]


def lines_of(records, end="\n"):
    return end.join(json.dumps(r, ensure_ascii=False) for r in records).encode()


NO_DATA = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a zstandard frame to be skipped
FILES = {
    "lines.jsonl": lines_of(TWO) + b"\n",
    "no final newline.jsonl": lines_of(TWO),
    "crlf.jsonl": lines_of(TWO, "\r\n") + b"\r\n",
    "bom.jsonl": b"\xef\xbb\xbf" + lines_of(TWO),
    "blank.jsonl": b"\n \t\n" + lines_of(TWO, "\n\n  \n") + b"\n\n",
    "array.jsonl": json.dumps(TWO).encode(),
    "pretty.json": json.dumps(TWO, indent=2).encode(),
    "objects.json": b"\n".join(json.dumps(r, indent=1).encode() for r in TWO),
    "run together.json": lines_of(TWO, ""),
    "run together over lines.json": lines_of(TWO, " ").replace(b":", b":\n"),
    "packed.gz": gzip.compress(lines_of(TWO[:1]) + b"\n") + gzip.compress(lines_of(TWO[1:])),
    "packed.zst": zstandard.compress(lines_of(TWO[:1]) + b"\n")
    + zstandard.compress(lines_of(TWO[1:])),
    "with a table of places.zst": NO_DATA + zstandard.compress(lines_of(TWO)) + NO_DATA,
}


@pytest.mark.parametrize("name", FILES)
def test_two_records_however_they_are_written(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    records = list(read_records(path))
    assert [r.fault for r in records] == [None, None]
    assert [r.value for r in records] == TWO


def test_line_numbers_count_blank_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\n\n{"prompt": "a"}\n\n{"prompt": oops}\n')
    found = list(read_records(path))
    assert [r.place for r in found] == ["line 3", "line 5"]
    assert "not JSON: Expecting value at column 12" in found[1].fault


def test_list_of_messages_is_one_record_and_list_of_records_is_many(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([USER, BOT]))
    assert [r.value for r in read_records(path)] == [[USER, BOT]]
    path.write_text(json.dumps([[USER, BOT], [USER, BOT]]))
    assert [r.value for r in read_records(path)] == [[USER, BOT]] * 2
    path.write_text("\n".join([json.dumps([USER, BOT])] * 3))
    assert [r.value for r in read_records(path)] == [[USER, BOT]] * 3


def test_plain_text_is_one_prompt_a_line(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text('Why?\n\n"Quoted," she said.\n3, 4, prompt\n')
    assert [r.value for r in read_records(path)] == ["Why?", '"Quoted," she said.', "3, 4, prompt"]


@pytest.mark.parametrize(("name", "delimiter"), [("x.csv", ","), ("x.tsv", "\t"), ("x", ";")])
def test_table(tmp_path, name, delimiter):
    path = tmp_path / name
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "prompt"], ["1", 'two\nlines, "quoted"; x'], ["2", "é"]])
    found = list(read_records(path))
    assert [r.place for r in found] == ["line 2", "line 4"]
    assert found[0].value == {"id": "1", "prompt": 'two\nlines, "quoted"; x'}
    path.write_text(f"id{delimiter}prompt\n1\n2{delimiter}x\n")
    fault, good = read_records(path)
    assert fault.fault == "1 cells where the head of the table has 2" and good.value["id"] == "2"


def test_named_column_and_missing_column(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("id,ask\n1,Why?\n")
    source = Source(path=str(path), column="ask")
    found = list(conversations(source, "x", Corpus(), "generate", Tally("x")))
    assert short(found[0].record["messages"]) == ["u:Why?"]
    source = Source(path=str(path), column="query")
    with pytest.raises(InputError, match="no column 'query'; found id, ask"):
        list(conversations(source, "x", Corpus(), "generate", Tally("x")))


def test_parquet_and_datasets_folder(tmp_path):
    import datasets

    rows = [
        {"messages": [{**USER, "tool_calls": None}, {**BOT, "tool_calls": None}], "prompt": None},
        {"messages": None, "prompt": "P"},
    ]
    data = datasets.Dataset.from_list(rows)
    (tmp_path / "folder").mkdir()
    data.to_parquet(tmp_path / "folder" / "train.parquet")
    data.save_to_disk(tmp_path / "saved")
    paths = [tmp_path / "folder" / "train.parquet", f"hf:{tmp_path}/folder", tmp_path / "saved"]
    for path in paths:
        records, _ = read(path, mode="generate")
        assert [short(r["messages"]) for r in records] == [["u:Q"], ["u:P"]], path


def test_parquet_with_two_columns_of_one_name(tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x\.parquet: two columns have the same name"):
        read(tmp_path / "x.parquet")


def test_dataset_that_cannot_be_loaded_is_one_message(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(InputError, match="cannot be loaded as a Hugging Face dataset"):
        read(f"hf:{tmp_path}/nothing/here/at/all")


DAMAGED = {
    "truncated.gz": (gzip.compress(lines_of(TWO) * 50)[:-9], "damaged or cut short"),
    "truncated.zst": (zstandard.compress(lines_of(TWO) * 50)[:-9], "damaged or cut short"),
    "truncated.json": (json.dumps(TWO).encode()[:-9], "record 2.*the file ends within it"),
    "cut array.json": (json.dumps(TWO).encode()[:-1], "record 2.*cut short"),
    "last comma.json": (b'[{"prompt": "a"}, ]', "record 2: not JSON: Expecting value, at ']'"),
    "rest.json": (b'[{"prompt": "a"}] and more', "record 2: not JSON: .*at 'and more'"),
    "null.jsonl": (b'null\n{"prompt": "a"}\n', "line 1: unknown layout: found NoneType"),
    "comma.json": (b'[{"prompt": "a"} {"prompt": "b"}]', "expected ',' or ']'"),
    "truncated.parquet": (b"PAR1" + bytes(50), "damaged Parquet file"),
    "latin1.jsonl": ('{"prompt": "é"}'.encode("latin-1"), "line 1.*not UTF-8: byte 0xe9"),
    "latin1.json": ('[{"prompt": "é"}]'.encode("latin-1"), "record 1.*not UTF-8"),
    "surrogate.jsonl": (b'{"prompt": "\\ud83d"}', "line 1.*half a surrogate pair"),
    "utf16.txt": ("Why?".encode("utf-16"), "UTF-16"),
    "x.zip": (b"PK\x03\x04....", "a zip file"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "nested too deeply"),
    "deep.json": (b'{"a":\n' + b"[" * 100_000, "nested too deeply"),
    "number.jsonl": (b'{"prompt": ' + b"9" * 5000 + b"}", "line 1.*not JSON"),
    "type.jsonl": (b'{"messages": [{"role": "user", "content": 5}]}', "content of turn 1 is int 5"),
    "json in text.txt": (b'# notes\n{"prompt": "x"}\n', "line 2.*began as plain text"),
    "quote.csv": (b'prompt,x\n"a,b\nc,d\n', "starts at line 2.*not closed"),
    "same.csv": (b"prompt,prompt\na,b\n", "two columns have the same name"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_one_message_with_the_place(tmp_path, name):
    data, message = DAMAGED[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"(?s){name}.*{message}"):
        read(path, mode="generate")


def test_bad_record_is_dropped_and_counted_when_asked(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": oops}\n{"prompt": "\xe9"}\n{"prompt": "b"}\n')
    records, tally = read(path, mode="generate", on_bad_record="drop")
    assert [short(r["messages"]) for r in records] == [["u:a"], ["u:b"]]
    assert tally.dropped == {"unreadable": 2} and tally.records_in == 4


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
def test_any_odd_value_at_any_key_is_kept_or_has_a_foreseen_reason(tmp_path, mode):
    path = json_lines(tmp_path / "a.jsonl", records := list(with_odd_values()))
    kept, tally = read(path, mode=mode, on_bad_record="drop", on_unknown_role="drop")
    assert tally.records_in == len(records) == len(kept) + sum(tally.dropped.values())
    assert "not foreseen" not in tally.dropped, tally.examples["not foreseen"]
    assert kept and all(isinstance(m["content"], str) for r in kept for m in r["messages"])


def test_a_fault_of_the_program_names_the_record(tmp_path, monkeypatch):
    def faulty(record):
        raise KeyError("oh")

    monkeypatch.setitem(LAYOUTS, "transcript (text)", faulty)
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "Q"}, {"text": "x"}])
    with pytest.raises(InputError, match=r"a\.jsonl: line 2: not foreseen: KeyError: 'oh'"):
        read(path, mode="generate")
    assert read(path, mode="generate", on_bad_record="drop")[1].dropped == {"not foreseen": 1}


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Q", "output": "A", "history": ["earlier", "turns"]},
        {"messages": [USER, BOT], "system": {"text": "S"}},
        {"messages": [USER, {**BOT, "reasoning_content": ["Because."]}]},
        {"prompt": {"text": "Q", "role": "prompter", "replies": ["A"]}},
    ],
)
def test_what_is_given_in_an_unknown_form_is_not_passed_over(record):
    with pytest.raises(Unusable, match="wrong type"):
        to_conversation(record)


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=60), head=st.sampled_from([b"", b"[", b'{"prompt":"a"}\n', b'"a"\n'])
)
def test_any_bytes_are_records_or_one_message(tmp_path_factory, data, head):
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(head + data)
    try:
        read(path, mode="generate", on_bad_record="drop", on_unknown_role="drop")
    except InputError as error:
        assert "bytes" in str(error)


# The shared real files.

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
def test_real_file(name):
    number, kept, roles = FORMATS[name]
    records, tally = read(SHARED / "formats" / name)
    assert (tally.records_in, len(records)) == (number, kept)
    if records:
        assert "".join(x["role"][0] for x in records[0]["messages"]) == roles
    prompts, tally = read(SHARED / "formats" / name, mode="generate")
    assert len(prompts) == number and not tally.dropped
    assert {x["role"] for r in prompts for x in r["messages"]} <= {"system", "user"}


@shared
def test_every_real_format_has_a_test():
    assert {p.name for p in (SHARED / "formats").iterdir()} == set(FORMATS)


WHOLE = {"crlf.jsonl", "bom.jsonl", "no_final_newline.jsonl", "array_named.jsonl", "data.jsonl.gz"}


@shared
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_whole_file_in_odd_clothes(name):
    records, tally = read(SHARED / "oddities" / name)
    assert len(records) == tally.records_in == 60
    assert not any("\r" in x["content"] for r in records for x in r["messages"])


@shared
@pytest.mark.parametrize(
    ("name", "number"),
    [("blank_lines.jsonl", 20), ("single_object.json", 1), ("three_records.jsonl", 3)],
)
def test_small_file(name, number):
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
def test_damaged_real_file(name, message):
    with pytest.raises(InputError, match=message):
        read(SHARED / "oddities" / name)


@shared
def test_bad_middle_line_dropped():
    records, tally = read(SHARED / "oddities" / "bad_middle_line.jsonl", on_bad_record="drop")
    assert tally.dropped == {"unreadable": 1}
    assert tally.examples["unreadable"][0]["place"] == "line 11"
    assert len(records) == tally.records_in - 1


@shared
def test_mixed_schemas_are_each_recognised():
    _, tally = read(SHARED / "oddities" / "mixed_schemas.jsonl", mode="generate")
    assert sum(tally.layouts.values()) == 7 and len(tally.layouts) >= 5


@shared
def test_string_and_list_content_and_image():
    records, tally = read(SHARED / "oddities" / "content_str_and_list.jsonl")
    assert [short(r["messages"]) for r in records] == [
        ["u:What is 2+2?", "a:4"],
        ["u:What is 3+3?", "a:6"],
    ]
    assert tally.dropped == {"not text": 1}


@shared
def test_tool_call_arguments_as_text_and_as_object_give_identical_records():
    text = read(SHARED / "oddities" / "tool_calls_str_args.jsonl")[0]
    objects = read(SHARED / "oddities" / "tool_calls_dict_args.jsonl")[0]
    assert len(text) == 5 and text == objects
    assert any("tool_calls" in x for r in text for x in r["messages"])


@shared
def test_odd_roles_line_by_line():
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
def test_prompt_lines(name):
    records, _ = read(SHARED / "oddities" / name, mode="generate")
    assert len(records) == 100
    assert records[0]["messages"][0]["content"].startswith("Janet")
