"""`store.py list` and `show`."""

import json

import numpy as np
import pytest

from support.finished_run import WIDTH, spoil


def test_list_counts_shards_and_names_their_runs(finished):
    finished.write_run("other", [finished.groups[2]])
    status, text = finished.call("list", "--json")
    found = json.loads(text)[finished.convention.key]
    assert status == 0
    by_id = {s["id"]: s for s in found}
    assert by_id[finished.shards[2].id]["runs"] == ["demo", "other"]
    shard = by_id[finished.shards[0].id]
    tokens = sum(len(r.input_ids) for r, _ in finished.groups[0])
    assert (shard["samples"], shard["tokens"], shard["runs"]) == (3, tokens, ["demo"])
    assert shard["bytes"] == finished.path(0).stat().st_size
    assert shard["raw_bytes"] == tokens * 4 * WIDTH * 2
    assert shard["ratio"] == pytest.approx(shard["bytes"] / shard["raw_bytes"])
    spoil(finished.path(0), "empty")
    status, text = finished.call("list")
    assert "demo, other" in text
    assert "not a whole shard" in text


def test_show_prints_each_samples_norms(finished):
    status, text = finished.call("show", finished.shards[0].id[:12], "--json")
    found = json.loads(text)
    assert status == 0
    row, states = finished.groups[0][1]
    sample = found["samples"][1]
    assert (sample["id"], sample["tokens"]) == (row.id, len(row.input_ids))
    expected = np.linalg.norm(states.float().numpy(), axis=-1).mean(0)
    assert list(sample["mean_norm"].values()) == pytest.approx(expected.tolist(), abs=1e-3)
    assert finished.call("show", finished.path(0))[0] == 0
    status, text = finished.call("show", "nothing")
    assert status == 1
    assert "expected the id of one shard" in text
