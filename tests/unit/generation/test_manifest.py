"""Records of generation, among them files that earlier versions wrote."""

import pytest

from aerie.common.errors import InputError
from aerie.common.files import write_json, write_json_lines
from aerie.config import Generation, Samples
from aerie.generation.answers import AnswerStore, Sampling
from aerie.generation.manifest import ResponsesManifest, load_answers
from aerie.generation.self_prompts_report import SelfPromptsReport
from aerie.samples.stored_answer import StoredAnswer

MANIFEST = {
    "key": "111ecd0bd3f48466",
    "verifier": "f" * 32,
    "sampling": {
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 128,
        "max_length": 512,
        "seed": 0,
        "first_turn_only": False,
        "model": None,
    },
    "records": 2,
    "answers": 2,
    "truncated": 1,
    "generated_tokens": 99,
    "not_answered": 0,
    "ended_early": 0,
    "reused": 0,
    "generated": 2,
    "captured": {"shards": 1, "tokens": 140, "failed": ["sample x: zeros"]},
    "load_seconds": 20.5,
    "seconds": 31.0,
}
SELF_PROMPTS = {
    "key": "eafc0b4fd075b0c3",
    "verifier": "f" * 32,
    "settings": {"number": 1, "min_tokens": 4, "max_attempts": 5.0, "near_duplicates": 0.8},
    "attempted": 2,
    "kept": 1,
    "dropped": {"too short": 1},
    "tokens": 9,
    "asked": 64,
    "examples": {"too short": [{"attempt": 0, "text": "so", "detail": "1 tokens"}]},
    "seconds": 3.5,
}
ANSWERS = [
    {
        "id": "a",
        "samples": [{"ids": [1, 20, 2], "spans": [[1, 3]]}],
        "finishes": ["stop"],
        "texts": ["x"],
    },
    {
        "ended": "prompt fills the window",
        "id": "b",
        "samples": [{"ids": [1, 20, 2], "spans": [[1, 3]]}],
        "finishes": ["length"],
        "texts": ["x"],
    },
    {"id": "c", "dropped": "the endpoint fails on the request", "again": True},
    {"id": "d", "samples": [], "finishes": [], "texts": []},
]


@pytest.mark.parametrize(
    ("kind", "value"), [(ResponsesManifest, MANIFEST), (SelfPromptsReport, SELF_PROMPTS)]
)
def test_earlier_file_is_read_and_written_unchanged(kind, value, tmp_path):
    write_json(tmp_path / "x.json", value)
    assert kind.read(tmp_path / "x.json").as_json() == value


@pytest.mark.parametrize("value", ANSWERS, ids=lambda value: value["id"])
def test_earlier_answer_is_read_and_written_unchanged(value):
    assert StoredAnswer.parse(value, "x").as_json() == value


def test_answer_missing_in_the_store_is_named(tmp_path):
    write_json(tmp_path / "manifest.json", MANIFEST)
    folder = AnswerStore(tmp_path, MANIFEST["key"]).folder
    write_json_lines(folder / "x.jsonl.zst", ANSWERS)
    splits = {"train": [{"id": "a"}], "heldout": [{"id": "b"}]}
    assert load_answers(tmp_path / "manifest.json", tmp_path, splits).keys() == {"a", "b"}
    splits["heldout"].append({"id": "gone"})
    with pytest.raises(InputError, match=r"answers to 1 records are no longer .* record gone;"):
        load_answers(tmp_path / "manifest.json", tmp_path, splits)


def test_sampling_names_the_model_only_with_endpoints():
    samples = Samples(max_length=99)
    assert Sampling.of(Generation(endpoint_model="x"), samples).model is None
    asked = Generation(endpoints=["http://h/v1"], temperature=0.5, first_turn_only=True)
    assert Sampling.of(asked, samples, "served") == Sampling(0.5, 1.0, 512, 99, 0, True, "served")
    named = Generation(endpoints=["http://h/v1"], endpoint_model="x")
    assert Sampling.of(named, samples, "served").model == "x"
