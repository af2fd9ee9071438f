"""What inspect_samples shows of a corpus."""

import json

import pytest

import inspect_samples
from aerie.common import cli
from support.chat import CALL, answer, make_tokenizer, user
from support.templates import CHATML


@pytest.mark.parametrize("mode", ["keep", "generate"])
def test_inspect_shows_samples_and_reasons(tmp_path, monkeypatch, capsys, mode):
    make_tokenizer("bytes", "chatml", CHATML).save_pretrained(tmp_path / "verifier")
    talks_ = [
        [user("What is 12 + 30?"), answer("It is 42, as everybody knows <|im_end|>.")],
        [user("[b]"), answer("no")],
        [user("c"), answer("x", tool_calls=[CALL])],
    ]
    lines = [json.dumps({"messages": t}) for t in talks_] + ["{not json"]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))

    def status(*more):
        monkeypatch.setattr("sys.argv", ["inspect", *arguments, *more])
        try:
            cli.run(inspect_samples.main)
        except SystemExit as end:
            return end.code
        return 0

    arguments = ["--verifier", str(tmp_path / "verifier"), "--mode", mode, "--records"]
    assert status(str(tmp_path / "talks.jsonl")) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>user\nWhat is 12 + 30?<|im_end|>" in out
    assert "unreadable" in out
    if mode == "keep":
        assert "⟦It is 42, as everybody knows <|im_end|>.<|im_end|>⟧" in out
        assert "under 8 supervised tokens" in out
        assert "dropped by the chat template: tool_calls in 1 of 4 records" in out
        assert "more than samples.max_lost_share = 0.1" in out
    else:
        assert "⟦" not in out and "here the verifier answers" in out
    (tmp_path / "asked.csv").write_text("id,ask\n1,Why?\n")
    source = json.dumps({"path": str(tmp_path / "asked.csv"), "column": "ask"})
    assert status(source) == (1 if mode == "keep" else 0)
    assert ("no assistant turn" if mode == "keep" else "Why?") in capsys.readouterr().out
    assert status(str(tmp_path / "absent")) == 1
    assert "absent" in capsys.readouterr().err
