"""Bytes to records, whole and damaged."""

import csv
import gzip
import json

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.common.errors import InputError
from aerie.config import Corpus, Source
from aerie.corpus.conversations import conversations
from aerie.corpus.reading import read_records
from aerie.corpus.report import Tally
from support.corpus import BOT, USER, read, short

TWO = [{"prompt": "Q\u2028é", "completion": "A"}, {"prompt": "R", "completion": "B"}]


def lines_of(records, end="\n"):
    return end.join(json.dumps(r, ensure_ascii=False) for r in records).encode()


NO_DATA = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a zstandard frame without data


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
    "with a seek table.zst": NO_DATA + zstandard.compress(lines_of(TWO)) + NO_DATA,
}


@pytest.mark.parametrize("name", FILES)
def test_two_records_in_every_file_format(tmp_path, name):
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


def test_list_of_messages_is_one_record(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([USER, BOT]))
    assert [r.value for r in read_records(path)] == [[USER, BOT]]
    path.write_text(json.dumps([[USER, BOT], [USER, BOT]]))
    assert [r.value for r in read_records(path)] == [[USER, BOT]] * 2
    path.write_text("\n".join([json.dumps([USER, BOT])] * 3))
    assert [r.value for r in read_records(path)] == [[USER, BOT]] * 3


def test_plain_text_has_one_prompt_per_line(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text('Why?\n\n"Quoted," she said.\n3, 4, prompt\n')
    assert [r.value for r in read_records(path)] == ["Why?", '"Quoted," she said.', "3, 4, prompt"]


@pytest.mark.parametrize(("name", "delimiter"), [("x.csv", ","), ("x.tsv", "\t"), ("x", ";")])
def test_table_rows(tmp_path, name, delimiter):
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
    found = list(conversations(source, "x", Corpus(), "generate", Tally(path="x")))
    assert short(found[0].conversation["messages"]) == ["u:Why?"]
    source = Source(path=str(path), column="query")
    with pytest.raises(InputError, match="no column 'query'; found id, ask"):
        list(conversations(source, "x", Corpus(), "generate", Tally(path="x")))


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


def test_unloadable_dataset_is_one_message(tmp_path):
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
def test_damaged_file_is_one_message_with_the_place(tmp_path, name):
    data, message = DAMAGED[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"(?s){name}.*{message}"):
        read(path, mode="generate")


def test_bad_records_are_dropped_and_counted(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": oops}\n{"prompt": "\xe9"}\n{"prompt": "b"}\n')
    records, tally = read(path, mode="generate", on_bad_record="drop")
    assert [short(r["messages"]) for r in records] == [["u:a"], ["u:b"]]
    assert tally.dropped == {"unreadable": 2} and tally.records_in == 4


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
