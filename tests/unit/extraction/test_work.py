"""What a lane finds in the store: damaged, foreign and moved shards, samples to copy."""

import errno
import itertools
from pathlib import Path

import pytest

from aerie.common.errors import InputError
from aerie.states.shard import Shard
from support.lanes import Lane, make_samples


@pytest.mark.parametrize(
    "damage", ["cut", "foreign", "other verifier", "other samples", "folder", "link to nothing"]
)
def test_a_damaged_or_wrong_shard_is_moved_aside_and_made_again(lane, damage):
    lane.run()
    whole = lane.bytes()
    path = lane.store.path(lane.shards[1].id)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "foreign":
        path.write_bytes(b"not a shard")
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "link to nothing":
        path.unlink()
        path.symlink_to("nothing")
    elif damage == "other samples":
        path.write_bytes(lane.store.path(lane.shards[0].id).read_bytes())
    else:
        data = path.read_bytes()
        path.write_bytes(data.replace(b"f" * 32, b"e" * 32))
    manifest = lane.run()
    assert manifest["extracted_samples"] == 12
    assert lane.bytes() == whole
    assert len(list((lane.store.folder / "damaged").iterdir())) == 1


def test_a_flipped_bit_is_detected_when_a_sample_is_copied(tmp_path, lane):
    lane.run()
    path = lane.store.path(lane.shards[0].id)
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)
    # The same samples in other shards: all are copied except those of the damaged one.
    edited = Lane(tmp_path, make_samples(60)[1:])
    manifest = edited.run(floor=1.0)
    assert manifest["samples"] == 59
    assert 1 <= manifest["extracted_samples"] <= 12
    assert edited.states_are_right()


def test_a_shard_that_another_run_has_moved_aside_is_not_moved_twice(lane):
    lane.run()
    path = lane.store.path(lane.shards[1].id)
    assert lane.store.set_aside(path) == lane.store.folder / "damaged" / path.name
    assert lane.store.set_aside(path) is None


@pytest.mark.parametrize(
    "kinds", list(itertools.product(["file", "folder"], repeat=2)), ids="-".join
)
def test_setting_a_shard_aside_again_replaces_the_earlier_one(lane, kinds):
    path = lane.store.path(lane.shards[1].id)
    path.parent.mkdir(parents=True)
    for kind in kinds:
        if kind == "folder":
            path.mkdir()
            (path / "x").write_text("x")
        else:
            path.write_text("no shard")
        lane.run()
        path.unlink()
    assert (lane.store.folder / "damaged" / path.name).is_dir() == (kinds[1] == "folder")


def test_a_shard_that_cannot_be_opened_stays_in_place(lane, monkeypatch):
    lane.run()
    path = lane.store.path(lane.shards[1].id)
    real = Path.open

    def refuse(self, *arguments, **more):
        if self == path:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return real(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match="Too many open files"):
        lane.run()
    assert path.is_file()
    assert lane.engine.started == 0


def test_a_sample_whose_shard_was_rewritten_is_not_copied_from_its_old_place(tmp_path, lane):
    """Another run rewrites the shard after this one looked, with the samples in another order."""
    lane.run()
    edited = Lane(tmp_path, make_samples(60)[1:])
    name, find = lane.shards[0].id, edited.store.find_samples

    def then_changed(keys):
        found = find(keys)
        with Shard(lane.store.path(name)) as shard:
            samples = [shard.read(number) for number in range(12)]
        lane.store.write(name, samples[::-1])
        return found

    edited.store.find_samples = then_changed
    assert edited.run(floor=1.0)["samples"] == 59
    assert edited.states_are_right()
    assert lane.store.has(name)


def test_shards_that_name_unknown_samples_are_an_error(lane):
    del lane.samples["s7"]
    with pytest.raises(InputError, match=r"1 of its samples .*\(s7\); delete both"):
        lane.run()
