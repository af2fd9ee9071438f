"""Manifests and facts of earlier versions stay readable."""

import json

import pytest

from aerie.states.convention import Convention
from aerie.states.facts import ShardFacts
from aerie.states.manifest import ImportManifest, LaneManifest, ManifestConvention

CONVENTION = {
    "key": "1bea7e845dff3f2f",
    "verifier": "f" * 32,
    "layer_ids": [2, 15, 27, 30],
    "hidden_size": 576,
    "format": "lossless",
    "last_layer": "before the final norm",
    "last_state": "all",
}
SHARD = {
    "id": "0" * 32,
    "file": f"{'0' * 32}.safetensors",
    "samples": ["a", "b"],
    "tokens": 7,
    "bytes": 1000,
    "checksum": "0" * 16,
}
LANE = {
    "convention": CONVENTION,
    "shards": [{**SHARD, "split": "train"}],
    "samples": 2,
    "tokens": 7,
    "raw_bytes": 32256,
    "omitted_bytes": 0,
    "bytes": 1000,
    "extracted_samples": 2,
    "extracted_tokens": 7,
    "adopted_samples": 0,
    "copied_samples": 0,
    "quarantined": {"c": "too long"},
    "seconds": 1.5,
}
IMPORT = {
    "convention": CONVENTION,
    "source": "/files",
    "shards": [SHARD],
    "samples": 2,
    "tokens": 7,
    "refused": {"hs_1.safetensors": "not readable"},
}


@pytest.mark.parametrize(("record", "content"), [(LaneManifest, LANE), (ImportManifest, IMPORT)])
def test_a_manifest_is_read_and_written_without_loss(tmp_path, record, content):
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(content))
    record.read(path).write(path)
    assert json.loads(path.read_text()) == content


def test_the_convention_of_a_manifest_is_that_of_the_store():
    convention = Convention("f" * 32, (2, 15, 27, 30), 576)
    found = ManifestConvention.of(convention)
    assert found.as_json() == CONVENTION
    assert tuple(found.aux_layer_ids) == convention.aux_layer_ids == (2, 15, 27)


@pytest.mark.parametrize(
    "content",
    [
        {"left_out": {"k": "no"}},
        {"bytes": 0, "left_out": {"k": "no"}},
        {"bytes": 5, "checksum": "0" * 16, "left_out": {}},
    ],
)
def test_facts_hold_only_what_is_known(tmp_path, content):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(content))
    ShardFacts.read(path).write(path)
    assert json.loads(path.read_text()) == content
