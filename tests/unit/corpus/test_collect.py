"""The program: three files, every record accounted for, one message for any fault."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import collect_prompts
from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.files import read_json_lines
from aerie.config import Corpus
from aerie.corpus.report import PromptsReport
from aerie.corpus.sources import parse_source
from support.paths import ROOT

SHARED = ROOT.parent / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not there")


@pytest.fixture
def collect(tmp_path, monkeypatch, capsys):
    """Run the program; gives status, what it wrote to stdout and stderr, the report or None."""

    def run(*sources, output=tmp_path / "out", mode="generate", prompt_sets=(), **corpus):
        given = {
            "corpus": {"sources": list(sources), **corpus},
            "generation": {"mode": mode},
            "evaluation": {"prompt_sets": {f"set{i}": p for i, p in enumerate(prompt_sets)}},
        }
        return program("--settings", json.dumps(given), output=output)

    def program(*arguments, output=tmp_path / "out"):
        monkeypatch.setattr(sys, "argv", ["collect_prompts.py", "--output", str(output)])
        sys.argv += arguments
        try:
            cli.run(collect_prompts.main)
            status = 0
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        report = output / "report.json"
        found = PromptsReport.read(report).as_json() if report.exists() else None
        return status, captured.out, captured.err, found

    run.program = program
    return run


def lines(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def prompts(number, text="prompt {}"):
    return [{"prompt": text.format(i)} for i in range(number)]


def written(output):
    return [list(read_json_lines(output / f"{side}.jsonl.zst")) for side in ("train", "heldout")]


def text_of(record):
    return record["messages"][0]["content"]


def test_collect_writes_three_files_with_default_settings(tmp_path, collect):
    status, out, err, report = collect(lines(tmp_path / "a.jsonl", prompts(500)))
    train, heldout = written(tmp_path / "out")
    assert status == 0 and err == ""
    assert "500 of 500 records kept" in out
    assert report["records_in"] == report["records_kept"] == 500
    assert (report["train"], report["heldout"]) == (len(train), len(heldout))
    assert report["heldout_share"] == Corpus().heldout_share
    assert abs(len(heldout) - 500 * Corpus().heldout_share) < 25
    assert {text_of(r) for r in train + heldout} == {f"prompt {i}" for i in range(500)}
    assert train[0].keys() == {"id", "source", "messages"}
    assert len(train[0]["id"]) == 32 and train[0]["source"] == "a"


def test_same_input_gives_same_bytes(tmp_path, collect):
    source = lines(tmp_path / "a.jsonl", prompts(50))
    collect(source)
    before = [p.read_bytes() for p in sorted((tmp_path / "out").iterdir())]
    collect(source)
    assert before == [p.read_bytes() for p in sorted((tmp_path / "out").iterdir())]
    assert len(before) == 3


def test_prompts_keep_their_side_when_the_corpus_grows(tmp_path, collect):
    collect(lines(tmp_path / "a.jsonl", prompts(300)))
    few = [{r["id"] for r in side} for side in written(tmp_path / "out")]
    collect(lines(tmp_path / "b.jsonl", prompts(100, "new {}")), str(tmp_path / "a.jsonl"))
    many = [{r["id"] for r in side} for side in written(tmp_path / "out")]
    assert few[0] < many[0] and few[1] < many[1]


def test_conversations_with_equal_first_prompt_are_on_one_side(tmp_path, collect):
    records = [
        [
            {"role": "user", "content": f"Same {i}" + " " * n},
            {"role": "assistant", "content": f"{n}"},
        ]
        for i in range(60)
        for n in range(3)
    ]
    collect(lines(tmp_path / "a.jsonl", records), mode="keep", heldout_share=0.3)
    train, heldout = ({text_of(r).strip() for r in side} for side in written(tmp_path / "out"))
    assert train and heldout and not train & heldout


def test_sources_with_name_limit_column_and_weight(tmp_path, collect):
    lines(tmp_path / "a.jsonl", [{"ask": f"Q {i}"} for i in range(100)])
    lines(tmp_path / "b.jsonl", prompts(400))
    first = {"path": str(tmp_path / "a.jsonl"), "column": "ask", "limit": 10, "name": "mine"}
    second = {"path": str(tmp_path / "b.jsonl"), "weight": 0.25}
    status, _, _, report = collect(first, second)
    assert status == 0
    assert report["sources"]["mine"]["records_kept"] == 10
    assert report["sources"]["mine"]["records_in"] == 10
    part = report["sources"]["b"]
    assert part["dropped"] == {"outside the source's weight": 400 - part["records_kept"]}
    assert abs(part["records_kept"] - 100) < 30


def test_several_files_by_glob_and_folder_in_order(tmp_path, collect):
    folder = tmp_path / "mine"
    folder.mkdir()
    lines(folder / "b.jsonl", prompts(3, "b{}"))
    lines(folder / "a.jsonl", prompts(3, "a{}"))
    (folder / "README.md").write_text("about")
    for source in (f"{folder}/*.jsonl", str(folder)):
        _, _, err, report = collect(source, limit=4)
        kept = {text_of(r) for side in written(tmp_path / "out") for r in side}
        assert kept == {"a0", "a1", "a2", "b0"} and report["sources"].keys() == {"mine"}
    assert "not data files, skipped: README.md" in err


def test_folder_with_links(tmp_path, collect):
    """A linked folder is read, once; a link to nothing, or what is no file, is not passed over."""
    folder, other = tmp_path / "mine", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    lines(folder / "a.jsonl", prompts(3, "a{}"))
    lines(other / "b.jsonl", prompts(3, "b{}"))
    (folder / "more").symlink_to(other)
    (folder / "itself").symlink_to(folder)
    assert collect(str(folder))[3]["records_in"] == 6
    (folder / "c.jsonl").symlink_to(tmp_path / "nothing")
    for source in (str(folder), f"{folder}/*.jsonl"):
        status, _, err, _ = collect(source)
        assert status == 1 and f"error: {folder}/c.jsonl: a link to nothing" in err
    (folder / "c.jsonl").unlink()
    os.mkfifo(folder / "c.jsonl")
    status, _, err, _ = collect(str(folder))
    assert status == 1 and f"error: {folder}/c.jsonl: neither a file nor a folder" in err


def test_every_record_is_in_a_file_or_counted(tmp_path, collect):
    records = [*prompts(20), *prompts(5), {"prompt": ""}, {"images": ["x"], "prompt": "Q"}]
    records += [{"prompt": "x" * 3000}, {"prompt": "prompt 3 \n"}]
    source = lines(tmp_path / "a.jsonl", records)
    status, out, _, report = collect(source, max_characters=2000)
    assert status == 0
    assert report["records_in"] == 29 and report["records_kept"] == 20
    expected = {"duplicate": 6, "empty user turn": 1, "not text": 1, "too long": 1}
    assert report["dropped"] == expected == report["sources"]["a"]["dropped"]
    examples = report["sources"]["a"]["examples"]
    assert [e["place"] for e in examples["duplicate"]] == ["line 21", "line 22", "line 23"]
    assert examples["not text"] == [
        {"file": source, "place": "line 27", "detail": "the record has 'images'"}
    ]
    assert "a: too long: 1, such as" in out and "line 28" in out


def test_duplicates_do_not_count_as_loss_but_other_reasons_do(tmp_path, collect):
    status, *_, report = collect(lines(tmp_path / "a.jsonl", prompts(2) * 10))
    assert status == 0 and report["kept_share"] == 1
    odd = lines(tmp_path / "b.jsonl", prompts(4) + [{"prompt": ""}] * 5)
    output = tmp_path / "other"
    status, _, err, report = collect(odd, output=output)
    assert status == 1 and report is None and not list(output.iterdir())
    assert "only 44.4% of the records are kept, the floor is 50%" in err
    assert "b: empty user turn: 5, such as" in err and "line 5" in err
    assert collect(odd, min_kept_share=0.4)[0] == 0


def test_source_without_usable_records_is_an_error(tmp_path, collect):
    good = lines(tmp_path / "a.jsonl", prompts(50))
    bad = lines(tmp_path / "b.jsonl", [{"prompt": ""}] * 3)
    status, _, err, _ = collect(good, bad)
    assert status == 1 and "source 'b': none of its 3 records is usable" in err
    again = collect(good, good)[3]
    assert again["sources"]["a-2"]["dropped"] == {"duplicate": 50}


@pytest.mark.parametrize("text", ["", " \n\n", "[]", "[ ]\n"])
def test_source_without_records_is_an_error_at_once(tmp_path, collect, text):
    (tmp_path / "a.jsonl").write_text(text)
    good = lines(tmp_path / "b.jsonl", prompts(3))
    status, _, err, report = collect(good, str(tmp_path / "a.jsonl"))
    assert status == 1 and report is None
    assert err.startswith(f"error: {tmp_path / 'a.jsonl'}: no records")


def test_one_record_is_trained_on_and_three_fill_both_sides(tmp_path, collect):
    status, _, err, report = collect(lines(tmp_path / "a.jsonl", prompts(1)))
    assert status == 0 and (report["train"], report["heldout"]) == (1, 0)
    assert "the held-out set is empty" in err and report["warnings"]
    status, _, err, report = collect(lines(tmp_path / "a.jsonl", prompts(3)))
    assert status == 0 and (report["train"], report["heldout"]) == (2, 1)


def test_keep_mode_keeps_the_answers(tmp_path, collect):
    records = [{"question": f"Q{i}", "answer": f"A{i}"} for i in range(5)]
    collect(lines(tmp_path / "a.jsonl", records), mode="keep")
    for record in itertools.chain(*written(tmp_path / "out")):
        question, answer = record["messages"]
        assert question["role"] == "user" and answer["role"] == "assistant"
        assert answer["content"] == question["content"].replace("Q", "A")
    status, _, err, _ = collect(lines(tmp_path / "b.jsonl", prompts(3)), mode="keep")
    assert status == 1 and "no record is usable" in err and "no assistant turn: 3" in err


def test_tools_are_kept(tmp_path, collect):
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {"messages": [{"role": "user", "content": "Q"}], "tools": json.dumps(tools)}
    collect(lines(tmp_path / "a.jsonl", [record]))
    assert written(tmp_path / "out")[0][0]["tools"] == tools


def test_decontamination_drops_overlapping_records(tmp_path, collect):
    long = " ".join(f"w{i}" for i in range(40))
    bench = lines(tmp_path / "bench.jsonl", [{"id": 1, "turns": [long, "Now shorter."]}])
    source = lines(tmp_path / "a.jsonl", [*prompts(9), {"prompt": f"Do {long}"}])
    status, _, _, report = collect(source, prompt_sets=[bench])
    assert status == 0 and report["dropped"] == {"contaminated": 1}
    assert report["evaluation_sets"] == {"bench": {"prompts": 1, "records_dropped": 1}}
    example = report["sources"]["a"]["examples"]["contaminated"][0]
    assert example["place"] == "line 10"
    assert example["detail"] == "bench: " + " ".join(f"w{i}" for i in range(13))
    assert collect(source)[3]["dropped"] == {}


def test_near_duplicates_only_in_large_corpora(tmp_path, collect, monkeypatch):
    words = [" ".join(f"w{i}x{j}" for j in range(50)) for i in range(6)]
    records = [{"prompt": w} for w in words] + [{"prompt": words[0] + " and more"}]
    source = lines(tmp_path / "a.jsonl", records)
    assert collect(source)[3]["dropped"] == {}
    monkeypatch.setattr("aerie.corpus.collect.NEAR_DUPLICATES_FROM", 5)
    report = collect(source)[3]
    assert report["dropped"] == {"near duplicate": 1} and report["records_kept"] == 6
    kept = {text_of(r) for side in written(tmp_path / "out") for r in side}
    assert kept == set(words)
    example = report["sources"]["a"]["examples"]["near duplicate"][0]
    begins = f"“{words[0][:79]}…”"
    assert example["detail"] == f"{begins} is much like {begins}"
    off = collect(source, near_duplicates=None)[3]
    assert off["dropped"] == {}


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("nothing.jsonl", {}, "nothing.jsonl: no such file or folder"),
        ("*.nothing", {}, "no file matches this pattern"),
        ("{}", {"mode": "other"}, "generation.mode: found 'other'"),
        ("{}", {"heldout_share": 1.5}, "corpus.heldout_share: found 1.5"),
        ("{}", {"limit": 0}, "corpus.limit: found 0"),
        ("{}", {"roles": {"x": "wizard"}}, "corpus.roles.x: found 'wizard'"),
        ("{}", {"roles": "x"}, "corpus.roles: found 'x'"),
        ({"path": "a", "colum": "b"}, {}, "corpus.sources.0.colum: unknown key"),
        ("\0", {}, "\0"),
        ({"path": " "}, {}, "source ' ': no path"),
        ("{}", {"prompt_sets": ["nothing.jsonl"]}, "nothing.jsonl: no such file"),
        ("{}", {"prompt_sets": [1]}, "evaluation.prompt_sets.set0: found 1"),
        ("{}", {"min_characters": 1}, "corpus.min_characters: no longer a key; it is fixed at 0"),
    ],
)
def test_wrong_settings_are_one_message(tmp_path, collect, source, settings, message):
    good = lines(tmp_path / "a.jsonl", prompts(3))
    status, _, err, _ = collect(good if source == "{}" else source, **settings)
    assert status == 1 and err.startswith("error: ") and message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"path": ', "not JSON"), ('{"corpus": {}}', "found ['corpus']; expected ['corpus', 'eval")],
)
def test_unreadable_settings_are_one_message(collect, text, message):
    status, _, err, _ = collect.program("--settings", text)
    assert status == 1 and err.startswith("error: ") and message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"path": ', "not JSON"),
        ('{"path": "a", "colum": "b"}', "corpus.sources.0.colum: unknown key"),
        ('{"path": 1}', "corpus.sources.0.path: found 1"),
    ],
)
def test_wrong_source_argument_is_one_message(text, message):
    with pytest.raises(InputError, match=message):
        parse_source(text)


def test_output_as_source_is_an_error(tmp_path, collect):
    lines(tmp_path / "out.jsonl", prompts(3))
    assert collect(str(tmp_path))[0] == 0
    status, _, err, _ = collect(str(tmp_path))
    assert status == 1 and "a source of this run and its output" in err


def test_unwritable_output_is_an_error(tmp_path, collect):
    (tmp_path / "file").write_text("")
    source = lines(tmp_path / "a.jsonl", prompts(3))
    status, _, err, _ = collect(source, output=tmp_path / "file" / "out")
    assert status == 1 and err.startswith("error: ")


def mutated(data, rng):
    """A few bytes cut, flipped, put in or doubled."""
    odd = [b"\0", b'"', b"{", b"]", b"\\ud800", b"NaN", b"\xff", b"\n", b"[" * 2000, b"9" * 5000]
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:at]
        elif kind == 1 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif kind == 2:
            data = data[:at] + rng.choice(odd) + data[at:]
        else:
            data = data[:at] + data[at + rng.randrange(1, 60) :]
    return data


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.parquet"])
def test_damaged_files_give_a_result_or_a_message(tmp_path, collect, name):
    import gzip

    rng = random.Random(name)
    records = [
        {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": "A"}]}
        for i in range(8)
    ]
    text = "\n".join(json.dumps(r) for r in records).encode()
    if name == "a.parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "whole")
        text = (tmp_path / "whole").read_bytes()
    whole = {
        "a.json": json.dumps(records).encode(),
        "a.csv": b"id,prompt\n" + b"".join(b'%d,"Why, %d?"\n' % (i, i) for i in range(8)),
        "a.jsonl.gz": gzip.compress(text),
    }.get(name, text)
    for _ in range(40):
        (tmp_path / name).write_bytes(mutated(whole, rng))
        policy = rng.choice(["stop", "drop"])
        mode = rng.choice(["keep", "generate"])
        output = tmp_path / "out"
        status, _, err, report = collect(
            str(tmp_path / name),
            on_bad_record=policy,
            on_unknown_role=policy,
            mode=mode,
        )
        if status:
            assert status == 1 and err.startswith("error: ")
        else:
            assert report["records_kept"] == sum(map(len, written(output)))
            assert report["records_in"] == report["records_kept"] + sum(report["dropped"].values())


def test_script_runs_from_another_folder(tmp_path):
    """With a file name that is not UTF-8; never a traceback."""
    script = str(ROOT / "scripts" / "collect_prompts.py")
    odd = os.fsencode(tmp_path) + b"/\xff.jsonl"
    Path(os.fsdecode(odd)).write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": ""}\n')

    def run(source):
        given = {"corpus": {"sources": [source]}, "generation": {}, "evaluation": {}}
        command = [sys.executable, script, "--output", "out", "--settings", json.dumps(given)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = run(f"{tmp_path}/*.jsonl")
    assert done.returncode == 0, done.stderr
    assert "2 of 3 records kept: 1 for training, 1 held out" in done.stdout
    done = run("no")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: no: no such file or folder")


@shared
def test_shared_duplicates(collect):
    status, _, _, report = collect(str(SHARED / "oddities" / "dups.jsonl"), mode="keep")
    assert status == 0
    assert report["records_in"] == 42 and report["records_kept"] == 20
    assert report["dropped"] == {"duplicate": 22}


@shared
@pytest.mark.parametrize("name", ["empty.jsonl", "whitespace_only.jsonl", "empty_array.json"])
def test_shared_files_without_records(collect, name):
    status, _, err, _ = collect(str(SHARED / "oddities" / name))
    assert status == 1 and "no records" in err


@shared
def test_shared_single_record_and_three_records(collect):
    status, _, err, report = collect(str(SHARED / "oddities" / "one_record.jsonl"))
    assert status == 0 and (report["train"], report["heldout"]) == (1, 0)
    assert "the held-out set is empty" in err
    status, _, _, report = collect(str(SHARED / "oddities" / "three_records.jsonl"))
    assert status == 0 and min(report["train"], report["heldout"]) >= 1


@shared
def test_shared_evaluation_prompts_are_contaminated(tmp_path, collect):
    evaluation = SHARED / "eval_prompts.jsonl"
    some = tmp_path / "a.jsonl"
    some.write_text("".join(evaluation.read_text().splitlines(keepends=True)[:50]))
    more = lines(tmp_path / "b.jsonl", prompts(60))
    _, _, _, report = collect(str(some), more, prompt_sets=[str(evaluation)], min_kept_share=0)
    assert report["sources"]["a"]["dropped"]["contaminated"] == 50
    assert report["sources"]["b"]["records_kept"] == 60
