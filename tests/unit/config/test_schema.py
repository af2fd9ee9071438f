"""config/schema.json: it is current, and accepts and refuses what the configuration does."""

import re

import jsonschema
import pytest
import yaml

from aerie.config.schema import config_schema
from support.paths import ROOT

TEXT = (ROOT / "config/schema.json").read_text(encoding="utf-8")
VALIDATOR = jsonschema.Draft202012Validator(yaml.safe_load(TEXT))


class Loader(yaml.SafeLoader):
    """Reads 5e-3 as a number, as YAML 1.2 and editors do."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def faults(text: str) -> list[str]:
    return [
        "/".join(map(str, fault.absolute_path))
        for fault in VALIDATOR.iter_errors(yaml.load(text, Loader))
    ]


def test_schema_is_current():
    assert config_schema() == TEXT, "run `python scripts/describe_config.py`"


def test_schema_is_itself_valid():
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize(
    "path", ["config.yaml", *(f"scales/{name}.yaml" for name in ("canary", "pilot", "full"))]
)
def test_repository_configurations_are_accepted(path):
    assert faults((ROOT / "config" / path).read_text(encoding="utf-8")) == []


def test_readme_example_is_accepted():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert faults(text.split("```yaml\n")[1].split("```")[0]) == []


@pytest.mark.parametrize(
    "text",
    [
        "corpus: {sources: [a.jsonl, {path: b.jsonl, limit: 3}]}",
        "drafters: {base: null, mine: {vocabulary: full}}",
        "evaluation: {prompt_sets: {benchmark: null, mine: quiz.jsonl}}",
        "corpus: {limit: null}",
        "drafters: {a: {learning_rate: 1e-4}}",
    ],
)
def test_shorthands_are_accepted(text):
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("corpsu: {}", ""),
        ("corpus: {limt: 3}", "corpus"),
        ("corpus: {sources: [{limit: 3}]}", "corpus/sources/0"),
        ("corpus: {heldout_share: 2}", "corpus/heldout_share"),
        ("drafters: {}", "drafters"),
        ("drafters: {../up: {}}", "drafters"),
        ("drafters: {a: {optimizer: sgd}}", "drafters/a"),
        ("engine: null", "engine"),
    ],
)
def test_mistakes_are_refused_where_they_are(text, place):
    assert place in faults(text)
