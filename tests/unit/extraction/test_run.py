"""The manifest of a lane, what it leaves out, and the space it needs."""

import json
import subprocess

import pytest

from aerie.common.errors import InputError
from aerie.extraction.extractor import LaneCounts
from aerie.extraction.run import describe_lane
from aerie.states.manifest import broken_shards
from aerie.states.room import check_room, measured_ratio
from support.lanes import refusing


@pytest.mark.parametrize("lost", ["a sample", "a shard"])
def test_samples_left_out_are_tried_again_when_their_facts_are_deleted(lane, lost):
    """With the command in docs/runbook.md, both for parts of shards and for whole ones."""

    def one(n, key, states):
        return "no" if key.startswith("s17") else states

    lane.run(one if lost == "a sample" else refusing(lane.shards[1]), floor=0.8)
    command = r"grep -L '\"left_out\": {}' *.json | xargs -r rm"
    subprocess.run(command, shell=True, cwd=lane.store.folder, check=True)
    manifest = lane.run()
    assert manifest["quarantined"] == {}
    assert manifest["samples"] == 60 == len(lane.read())
    assert set(lane.engine.asked) == set(lane.shards[1].samples)
    lane.run()
    assert lane.engine.started == 0


def test_a_shard_that_disappears_before_the_manifest_is_written_is_an_error(lane):
    lane.run()
    work = lane.look()
    lane.store.path(lane.shards[2].id).unlink()
    with pytest.raises(InputError, match="complete a moment ago and is not now"):
        describe_lane(work, LaneCounts(), 0.0)


def test_shards_of_a_manifest_that_are_gone_or_cut_short_are_reported(tmp_path, lane):
    manifest = tmp_path / "lane-0.json"
    assert broken_shards(manifest, tmp_path / "store") == []
    manifest.write_text(json.dumps(lane.run()))
    assert broken_shards(manifest, tmp_path / "store") == []
    # Temporary files that another run writes beside the shards do not count.
    (lane.store.folder / ".x.1.abc.tmp").symlink_to("gone")
    assert broken_shards(manifest, tmp_path / "store") == []
    first, second, *_ = (lane.store.path(s.id) for s in lane.shards)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    assert set(broken_shards(manifest, tmp_path / "store")) == {first.name, second.name}
    for text in ("{", "[]", '{"shards": [1]}', '{"shards": [{"file": "a", "bytes": 1}]}'):
        manifest.write_text(text)
        assert broken_shards(manifest, tmp_path / "store") == ["lane-0.json"]


def test_too_little_space_is_an_error_with_figures(lane):
    with pytest.raises(InputError, match=r"max_gib = 0\.001"):
        check_room(lane.store, 1_000_000, 0.001)
    with pytest.raises(InputError, match=r"1,000,000,000,000 tokens take .* GiB are free"):
        check_room(lane.store, 10**12, None)
    check_room(lane.store, 0, 0.000001)
    check_room(lane.store, 1000, 1)


def test_space_is_estimated_with_the_measured_compression(lane):
    assert measured_ratio(lane.store) == 1.0
    manifest = lane.run()
    ratio = measured_ratio(lane.store)
    assert ratio == pytest.approx(min(1.0, 1.05 * manifest["bytes"] / manifest["raw_bytes"]))
