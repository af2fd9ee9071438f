"""`store.py verify`: what is wrong with a shard, and how it is repaired."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from aerie.common.files import write_json
from aerie.extraction.extractor import LaneCounts
from aerie.extraction.run import describe_lane
from aerie.extraction.work import LaneWork
from aerie.samples.shards import plan_shard
from aerie.states.convention import Convention
from aerie.states.facts import facts_path, write_nothing_kept
from aerie.states.ids import sample_key
from aerie.states.manifest import broken_shards
from aerie.states.shard import Sample
from aerie.states.store import Store, write_shard
from support.finished_run import IDS, LAYERS, WIDTH, export, make_row, spoil


def test_verify_accepts_a_whole_store(finished):
    status, text = finished.call("verify")
    tokens = sum(len(r.input_ids) for r in finished.rows.values())
    assert (status, f"3 shards with {tokens} tokens read, 0 wrong" in text) == (0, True), text


@pytest.mark.parametrize("kind", ["truncated", "flipped", "foreign", "of another tool", "empty"])
def test_verify_names_a_damaged_shard_and_sets_it_aside(finished, kind):
    spoil(finished.path(1), kind)
    before = finished.files()
    status, text = finished.call("verify")
    assert status == 1
    assert str(finished.path(1).relative_to(finished.folder)) in text
    assert "1 wrong" in text
    assert finished.files() == before  # without --set-aside nothing is touched
    status, _ = finished.call("verify", "--set-aside")
    assert status == 1
    assert not finished.path(1).exists()
    assert (finished.store.folder / "damaged" / finished.path(1).name).is_file()
    # The lane that made it runs again, and only that one; until then its loss can be seen.
    assert broken_shards(finished.lane(1), finished.root) == [finished.path(1).name]
    assert broken_shards(finished.lane(0), finished.root) == []
    assert LaneWork(finished.store, finished.rows, finished.shards).missing == [finished.shards[1]]
    status, text = finished.call("verify")
    assert status == 1
    assert "missing, though a manifest names it" in text


def test_a_shard_under_another_shards_name_is_foreign(finished):
    shutil.copy(finished.path(0), finished.path(1))
    status, text = finished.call("verify", finished.shards[1].id[:10])
    assert status == 1
    assert "its samples are not those of its name" in text


def test_a_shard_of_another_convention_is_foreign(finished):
    other = Store(finished.root, Convention("f" * 32, (0, 2, 4, LAYERS), WIDTH))
    group = finished.groups[1]
    samples = [Sample(r.id, torch.tensor(r.input_ids), s) for r, s in group]
    shutil.copy(other.write(finished.shards[1].id, samples), finished.path(1))
    status, text = finished.call("verify")
    assert status == 1
    assert f"belongs to convention {other.convention.key}" in text


def test_verify_finds_states_that_a_broken_writer_let_pass(finished, monkeypatch):
    row, states = finished.groups[1][0]
    states = states.clone()
    states[3, 1, 2] = float("nan")
    monkeypatch.setattr("aerie.states.shard_writer.check_states", lambda *_: None)
    samples = [Sample(r.id, torch.tensor(r.input_ids), s) for r, s in finished.groups[1][1:]]
    samples.insert(0, Sample(row.id, torch.tensor(row.input_ids), states))
    finished.store.write(finished.shards[1].id, samples)
    status, text = finished.call("verify")
    assert status == 1
    assert "NaN or infinity" in text


def test_verify_finds_a_missing_shard_by_its_manifest(finished):
    finished.path(2).unlink()
    status, text = finished.call("verify", "--set-aside")
    assert status == 1
    assert "missing" in text
    assert broken_shards(finished.lane(0), finished.root) == [finished.path(2).name]


def test_a_shard_with_other_bytes_than_its_manifest_is_kept_and_the_manifest_deleted(finished):
    manifest = json.loads(finished.lane(1).read_text())
    manifest["shards"][0]["checksum"] = "0" * 16
    write_json(finished.lane(1), manifest)
    status, text = finished.call("verify", "--set-aside")
    assert status == 1
    assert "size or checksum" in text
    assert finished.path(1).is_file()
    assert not finished.lane(1).exists()


def test_facts_of_a_shard_without_kept_samples_stay_while_a_run_wants_it(finished):
    path, rows = finished.path(1), [row for row, _ in finished.groups[1]]
    path.unlink()
    write_nothing_kept(path, {sample_key(row.input_ids): "too long" for row in rows})
    work = LaneWork(finished.store, finished.rows, finished.shards[1::2])
    assert work.missing == []
    describe_lane(work, LaneCounts(), 0.0).write(finished.lane(1))
    for command in ("verify", "list", "gc"):
        status, text = finished.call(command)
        assert status == 0, text
        assert path.stem not in text
    assert "0 files" in text
    facts = facts_path(path)
    # Also while it cannot be told what is wanted.
    finished.lane(0).rename(finished.lane(0).with_suffix(".away"))
    finished.call("gc", "--delete")
    assert facts.is_file()
    finished.lane(0).with_suffix(".away").rename(finished.lane(0))
    finished.call("gc", "--delete")
    assert facts.is_file()
    export(finished, "speculators")
    assert "5 samples" in finished.text
    shutil.rmtree(finished.folder / "results/demo")
    finished.call("gc", "--delete")
    assert not facts.is_file()


def test_a_shard_that_lacks_only_quarantined_samples_is_whole(finished):
    first, *others = finished.groups[1]
    samples = [Sample(r.id, torch.tensor(r.input_ids), s) for r, s in others]
    left_out = {sample_key(first[0].input_ids): "too long"}
    write_shard(finished.store, finished.shards[1].id, samples, left_out)
    work = LaneWork(finished.store, finished.rows, [finished.shards[1]])
    describe_lane(work, LaneCounts(), 0.0).write(finished.lane(1))
    status, text = finished.call("verify")
    assert (status, "3 shards with" in text) == (0, True), text
    # Also where the run that wanted it is not known.
    status, text = finished.call("--results", finished.folder, "verify")
    assert (status, "3 shards with" in text) == (0, True), text
    # Under another's name it is foreign all the same.
    write_shard(finished.store, finished.shards[0].id, samples, left_out)
    finished.path(0).replace(finished.path(1))
    status, text = finished.call("verify", finished.shards[1].id)
    assert "its samples are not those of its name" in text


def test_fp8_states_rounded_to_zero_are_not_damage(finished):
    row, states = finished.groups[1][0]
    states = states.clone()
    states[0, 0] *= 0.001
    states[0, -1] *= 50_000
    store = Store(finished.root, Convention("f" * 32, IDS, WIDTH, "fp8"))
    sample = Sample(row.id, torch.tensor(row.input_ids), states)
    store.write(plan_shard("train", [row]).id, [sample])
    status, text = finished.call("verify")
    assert (status, "4 shards with" in text) == (0, True), text


def test_a_shard_of_another_version_is_named_and_left_alone(finished, monkeypatch):
    monkeypatch.setattr("aerie.common.versions.SHARD_VERSION", 1)
    row, states = make_row(finished.verifier, 50)
    store = Store(finished.root, finished.convention)
    shard = plan_shard("train", [row]).id
    path = store.write(shard, [Sample(row.id, torch.tensor(row.input_ids), states)])
    monkeypatch.setattr("aerie.common.versions.SHARD_VERSION", 2)
    for command in (("verify", "--set-aside"), ("list",), ("show", shard)):
        text = finished.call(*command)[1]
        assert "format version 1, and this Aerie reads version 2 only" in text, text
        assert "store.py gc" in text
        assert "moves" not in text
    assert path.is_file()
    assert finished.call("gc", "--delete")[0] == 0
    assert not path.exists()


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "link to itself"])
def test_a_folder_or_link_under_a_shards_name_stops_no_command(finished, kind):
    path = finished.path(1)
    path.unlink()
    if kind == "folder":
        path.mkdir()
        (path / "file").write_text("x")
    else:
        path.symlink_to("nothing" if kind == "link to nothing" else path.name)
    for command in ("list", "gc", "verify"):
        status, text = finished.call(command)
        assert status == (command == "verify"), text
        assert command == "gc" or "not a whole shard" in text
    assert finished.call("show", finished.shards[1].id)[0] == 77
    assert "repair: move the file aside" in text
    finished.call("verify", "--set-aside")
    assert not os.path.lexists(path)
    assert os.path.lexists(finished.store.folder / "damaged" / path.name)
    assert "missing, though a manifest names it" in finished.call("verify")[1]
    assert finished.call("gc", "--delete")[0] == 0
    assert not os.path.lexists(finished.store.folder / "damaged" / path.name)


def test_an_unreadable_shard_does_not_count_as_damaged(finished, monkeypatch):
    real, path = Path.open, finished.path(1)

    def refuse(self, *arguments, **more):
        if self == path.relative_to(finished.folder):
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    status, text = finished.call("verify", "--set-aside")
    assert status == 1
    assert "Permission denied" in text
    assert path.is_file()
    assert finished.lane(1).is_file()


@pytest.mark.parametrize("what", ["an empty store", "an empty folder of a convention"])
def test_an_empty_store_is_not_an_error(finished, what):
    shutil.rmtree(finished.folder / "results")
    (finished.root / ("." if what == "an empty store" else "hidden_states/0123")).mkdir(
        parents=True
    )
    for command in (["verify"], ["verify", "--sample", "0.5"], ["list"], ["gc", "--delete"]):
        assert finished.call(*command)[0] == 0
    assert finished.call("--store", "nowhere", "list")[0] == 1


def test_verify_takes_a_number_or_a_share_of_the_shards(finished):
    assert "1 shards with" in finished.call("verify", "--sample", "1")[1]
    assert "2 shards with" in finished.call("verify", "--sample", "0.7")[1]
    for size in ("-1", "0", "1.5", "nan", "inf", "few"):
        status, text = finished.call("verify", "--sample", size)
        assert status == 2
        assert "expected a number of shards" in text


def test_verify_names_a_damaged_manifest(finished):
    finished.lane(0).write_text("{")
    status, text = finished.call("verify")
    assert status == 1
    assert "lane-0.json" in text
