"""The report: what a reader sees, of runs with and without their optional parts."""

import html.parser
import json
import re

import pytest

from aerie.common.files import write_json_lines
from aerie.config import Config
from aerie.report import drafter_charts
from aerie.report.run import REPORTED_SECTIONS
from support.records import prompt_set


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
def page():
    def make(run):
        return Page(run.write().render())

    return make


def test_result_comes_first_in_words_and_figures(fake, page):
    found = page(fake(evaluation={"concurrencies": [1, 2]}))
    top = found.text[: found.text.index("How to serve it")]
    assert "each verifier step yields 1.89 tokens on held-out prompts" in top
    assert "1.09 times as fast as without it (concurrency 1)" in top
    assert "expected by validation 1.99" in top and "0.10 more than served" in top
    assert "1.09×" in top and "1.04×" in top and "concurrency 2" in top
    assert "within the draft vocabulary" in top
    assert "Likely causes" not in top


def test_every_plot_is_drawn(fake, page):
    found = page(fake().benchmarks())
    assert set(found.plots) == ALL == set(found.figures)
    served = next(x for x in found.figures["positions"]["data"] if "served" in x["name"])
    assert served["y"] == [0.489, 0.262, 0.143]
    speed = {x["name"]: x["x"] for x in found.figures["speed"]["data"] if x["xaxis"] == "x"}
    assert speed["without drafter"] == [46.0]
    assert speed["with drafter"] == [pytest.approx(46 * 1.09)]
    assert max(found.figures["coverage"]["data"][0]["x"]) == 32000
    assert len(found.figures["loss"]["data"][1]["x"]) == 3


def test_page_loads_nothing(fake, page):
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


def test_examples_show_the_prompt_and_its_place(fake, page):
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


def test_savings_of_one_pass_are_shown(fake, page):
    run = fake()
    run.files["responses/manifest.json"]["load_seconds"] = 41.0
    assert "second start of the engine" not in page(run).text
    run.files["hidden_states/lane-0.json"] |= {"extracted_samples": 0, "extracted_tokens": 0}
    text = page(run).text
    assert "saved a second pass over them and a second start of the engine (41.0 s)" in text


def test_hidden_states_show_size_and_origin(fake, page):
    text = page(fake(hidden_states={"lanes": 2})).text
    assert "304,000 tokens" in text and "(66.4%)" in text
    assert "118,000 tokens while answering" in text
    assert "68,000 tokens (420 samples) by 2 lanes" in text
    assert "2, 15, 27, 30" in text and "before the final norm" in text
    assert "left out, of the last layer where no loss is computed" in text


def test_loss_is_explained_as_a_sum_over_the_steps(fake, page):
    assert "summed over the TTT steps" in page(fake()).text


def test_several_drafters_are_shown_side_by_side(fake, page):
    found = page(fake(drafters=TWO).benchmarks())
    assert "With base ," in found.text and "With wide ," in found.text
    names = {x["name"] for x in found.figures["positions"]["data"]}
    assert {"base, served", "wide, served", "base, validation", "wide, validation"} == names
    stages = found.figures["durations"]["data"][0]["y"]
    assert "train_drafter base" in stages and "train_drafter wide" in stages
    assert found.figures["speed"]["data"][0]["y"] == ["base, concurrency 1", "wide, concurrency 1"]


def test_page_without_optional_parts(fake, page):
    run = fake(generation={"mode": "keep"}, drafters={"all": {"vocabulary": "full"}})
    found = page(run)
    assert set(found.plots) == ALL - {"coverage", "durations"}
    assert "the corpus's own (generation.mode: keep)" in found.text
    assert "full vocabulary" in found.text
    assert "No durations were recorded" in found.text
    assert "within the draft vocabulary" not in found.text


def test_unusable_benchmark_has_no_bar(fake, page):
    run = fake()
    run.benchmark("train_drafter", "base", 100)
    run.benchmark("train_drafter", "gone", 100)
    run.benchmark("measure_speed", "base", "-")
    (run.folder / "benchmarks/measure_speed/other.tsv").write_bytes(b"\xff\xfe")
    assert page(run).figures["durations"]["data"][0]["y"] == ["train_drafter base"]


def test_text_from_the_data_is_escaped(fake, page):
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
    run.files["evaluation/base/acceptance.json"]["prompt_sets"][nasty] = prompt_set(
        [0.1] * 3, 4
    ).as_json()
    found = page(run)
    assert len(found.scripts) == 2 and "img" not in found.elements
    assert "<script>alert(1)</script>" in found.text
    labels = [y for x in found.figures["prompt_sets"]["data"] for y in x["y"]]
    assert not any("<" in y for y in labels)


def test_slower_drafter_is_called_slower(fake, page):
    run = fake()
    run.ratio = 0.8
    run._drafter("base", 0)
    text = page(run).text
    assert "vLLM generates at 0.80 of its speed without it" in text
    assert "would pay from an acceptance length of 2.37" in text


def test_large_gap_names_likely_causes(fake, page):
    run = fake(generation={"mode": "keep"}, drafters={"base": {"vocabulary": 500}})
    run.served = [0.1, 0.01, 0.0]
    run._drafter("base", 0)
    text = page(run).text
    assert "Validation expects 0.88 tokens a step more than are served" in text
    causes = text[text.index("Likely causes") :]
    assert causes.index("generation.mode: keep") < causes.index("number format")
    assert "covers 77.9% of the target tokens" in causes and "chat template" in causes


def test_drafted_tokens_may_differ_from_training(fake, page):
    run = fake()
    run.served = [0.489, 0.262, 0.143, 0.05, 0.01]
    run._drafter("base", 0)
    found = page(run)
    assert "expected by validation 1.99" in found.text
    assert "on the first 3 tokens (1.89)" in found.text
    run.served = [0.489]
    run._drafter("base", 0)
    assert "0.04 more than served" in page(run).text


def test_missing_validation_is_shown(fake, page):
    run = fake()
    run.metrics["base"] = [x for x in run.metrics["base"] if not x.get("validation")]
    assert "no validation was recorded" in page(run).text


def test_long_training_is_averaged_to_few_points():
    steps, values = drafter_charts.smooth(range(100_001), (float(i) for i in range(100_001)))
    assert len(steps) == len(values) <= drafter_charts.POINTS
    assert values[0] == pytest.approx(steps[0])
    assert drafter_charts.smooth([], []) == ([], [])


def test_sections_without_influence_are_not_reported():
    assert set(Config.model_fields) - set(REPORTED_SECTIONS) == {"watch", "store", "notify"}
