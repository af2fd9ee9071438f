"""The program `tokenize_samples` in mode `keep`."""

import json
import shutil
import sys

import pytest

import tokenize_samples
from aerie.common.errors import InputError
from aerie.common.files import write_json_lines
from aerie.samples.file import read_samples
from aerie.samples.report import SamplesReport
from aerie.samples.shards import ShardList
from support.models import make_fingerprint

STRICT = """{{% for m in messages %}}{{% if m.role == 'system' %}}
{{{{ raise_exception('no system here') }}}}{{% endif %}}{{% endfor %}}{}"""


@pytest.fixture
def tokenize(tmp_path, tiny_verifier, monkeypatch):
    """Runs the program on conversations, with a template that refuses system turns; returns the
    report."""
    folder = tmp_path / "verifier"
    shutil.copytree(tiny_verifier, folder)
    plain = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(STRICT.format(plain))

    def run(conversations, samples_per_shard=16, **samples):
        records = [
            {"id": f"{i:032x}", "source": "s", "messages": messages}
            for i, messages in enumerate(conversations)
        ]
        write_json_lines(tmp_path / "train.jsonl.zst", records)
        write_json_lines(tmp_path / "heldout.jsonl.zst", [])
        make_fingerprint(path=str(folder)).write(tmp_path / "verifier.json")
        settings = {
            "samples": {
                "max_length": 64,
                "min_supervised_tokens": 1,
                "min_kept_share": 0.5,
                "max_lost_share": 0.5,
                **samples,
            },
            "hidden_states": {"samples_per_shard": samples_per_shard},
            "verifier": {},
        }
        given = {
            "train": tmp_path / "train.jsonl.zst",
            "heldout": tmp_path / "heldout.jsonl.zst",
            "verifier": tmp_path / "verifier.json",
            "store": tmp_path / "store",
            "settings": json.dumps(settings),
            "samples": tmp_path / "samples.parquet",
            "shards": tmp_path / "shards.json",
            "report": tmp_path / "report.json",
        }
        monkeypatch.setattr(sys, "argv", ["x", *(f"--{k}={v}" for k, v in given.items())])
        tokenize_samples.main()
        return SamplesReport.read(tmp_path / "report.json")

    return run


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


REFUSED = [{"role": "system", "content": "S"}, *turns("q", "a")]
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
LOST = [*turns("q"), {"role": "assistant", "content": "a", "tool_calls": [CALL]}]


def test_record_refused_by_the_template_is_counted(tokenize):
    report = tokenize([turns("q", "a"), turns("r", "b"), REFUSED])
    assert (report.records_in, report.records_kept) == (3, 2)
    (reason,) = report.dropped
    assert "no system here" in reason and report.dropped[reason] == 1
    assert report.examples[reason] == [f"{2:032x}"]
    with pytest.raises(InputError, match="only 2 of 3 records became samples"):
        tokenize([turns("q", "a"), turns("r", "b"), REFUSED], min_kept_share=0.9)


def test_groups_with_the_same_tokens_become_one_shard(tokenize, tmp_path):
    """Such as records of one first turn with `generation.first_turn_only`."""
    same = turns("q", "a")
    conversations = [same, turns("r", "b"), same, same]
    report = tokenize(conversations, samples_per_shard=1, min_kept_share=0.1)
    (reason,) = report.dropped
    assert "the same tokens" in reason
    assert (report.records_in, report.records_kept) == (4, 2)
    assert report.dropped[reason] == 2
    shards = ShardList.read(tmp_path / "shards.json").shards
    assert len({s.id for s in shards}) == len(shards) == 2
    assert set(read_samples(tmp_path / "samples.parquet")) == {i for s in shards for i in s.samples}


def test_no_sample_at_all_is_an_error_even_without_a_floor(tokenize):
    with pytest.raises(InputError, match="only 0 of 1 records became samples"):
        tokenize([REFUSED], min_kept_share=0)


def test_parts_the_template_drops_are_counted_and_limited(tokenize):
    report = tokenize([turns("q", "a"), LOST])
    assert report.lost_by_template == {"tool_calls": 1}
    assert report.examples["the template loses: tool_calls"] == [f"{1:032x}"]
    with pytest.raises(
        InputError, match=r"leaves something out of 1 of 2 .*samples\.max_lost_share"
    ):
        tokenize([turns("q", "a"), LOST], max_lost_share=0.4)
