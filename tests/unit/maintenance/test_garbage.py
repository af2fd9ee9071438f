"""`store.py gc`: what may be deleted."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from aerie.common.leases import Leases
from aerie.samples.shards import plan_shard
from aerie.states.facts import facts_path
from aerie.states.shard import Sample
from aerie.states.store import write_shard
from support.finished_run import make_row, spoil


@pytest.fixture
def unnamed(finished) -> Path:
    """A shard that no manifest names."""
    row, states = make_row(finished.verifier, 50)
    shard = plan_shard("train", [row]).id
    write_shard(finished.store, shard, [Sample(row.id, torch.tensor(row.input_ids), states)], {})
    return finished.store.path(shard)


def test_gc_lists_garbage_and_deletes_nothing(finished, unnamed):
    before = finished.files()
    status, text = finished.call("gc")
    assert status == 0
    assert str(unnamed.relative_to(finished.folder)) in text
    size = unnamed.stat().st_size + facts_path(unnamed).stat().st_size
    assert f"2 files, {size} bytes" in text
    assert finished.files() == before


def test_gc_deletes_only_what_no_run_refers_to(finished, unnamed):
    finished.write_run("other", [finished.groups[2], [make_row(finished.verifier, 9)]])
    shutil.rmtree(finished.folder / "results/demo")
    before = set(finished.files())
    status, _ = finished.call("gc", "--delete")
    shards = [unnamed, finished.path(0), finished.path(1)]
    assert status == 0
    assert before - set(finished.files()) == {str(p) for s in shards for p in (s, facts_path(s))}


@pytest.mark.parametrize("what", ["no samples", "an unextracted shard", "no responses", "damaged"])
def test_gc_keeps_all_shards_while_a_run_is_unfinished(finished, unnamed, what):
    other = finished.folder / "results/other"
    finished.write_run("other", [[make_row(finished.verifier, 9)]])
    if what == "no samples":
        (other / "samples/shards.json").unlink()
    elif what == "an unextracted shard":
        (other / "hidden_states/lane-0.json").unlink()
    elif what == "no responses":
        (other / "responses/manifest.json").unlink()
    else:
        (other / "hidden_states/lane-0.json").write_text("[]")
    before = finished.files()
    status, text = finished.call("gc", "--delete")
    assert status == 0
    assert "other" in text
    assert "no shard is collected" in text
    assert finished.files() == before


def test_gc_does_not_delete_while_snakemake_works(finished, unnamed):
    (finished.folder / ".snakemake/locks").mkdir(parents=True)
    (finished.folder / ".snakemake/locks/0.input.lock").write_text("")
    status, text = finished.call("gc", "--delete")
    assert status == 1
    assert "Snakemake" in text
    assert unnamed.is_file()


def test_gc_does_not_delete_during_a_run_of_another_checkout(finished, unnamed):
    with Leases() as other:
        assert other.take(finished.folder / "results/demo/run")
        status, text = finished.call("gc", "--delete")
    assert status == 1
    assert "results/demo: a run is at work (process" in text
    assert unnamed.is_file()


def test_gc_of_a_shared_store_asks_for_all_folders_of_runs(finished):
    """Runs of two checkouts use it; each names shards that the other does not."""
    shared = finished.folder / "shared"
    (finished.folder / "results/store").rename(shared)
    before = set(shared.rglob("*.safetensors"))
    status, text = finished.call("--store", shared, "gc", "--delete")
    assert status == 1
    assert "--results" in text
    (finished.folder / "other/results").mkdir(parents=True)
    (finished.folder / "results/demo").rename(finished.folder / "other/results/demo")
    (finished.folder / "results/mine").mkdir()
    both = ("--results", "results", "--results", "other/results")
    status, text = finished.call("--store", shared, *both, "gc", "--delete")
    assert status == 0, text
    assert set(shared.rglob("*.safetensors")) == before
    status, text = finished.call("--store", shared, "--results", "results", "gc")
    assert f"{2 * len(before)} files" in text  # what would have been lost


@pytest.mark.parametrize("results", ["result", "results/demo", "results/demo/samples.json"])
def test_gc_refuses_a_folder_that_does_not_hold_runs(finished, results):
    """With a mistyped name no run would name any shard."""
    before = finished.files()
    status, text = finished.call("--results", results, "gc", "--delete")
    assert status == 1
    assert f"{results}: " in text
    assert finished.files() == before


def test_gc_names_what_it_could_not_delete(finished, unnamed, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "x")

    with monkeypatch.context() as held:
        held.setattr(Path, "unlink", refuse)
        status, text = finished.call("gc", "--delete")
    assert status == 1
    assert "not deleted: Permission denied" in text
    assert "0 files, 0 bytes (0 bytes) deleted; 2 could not be" in text
    assert unnamed.is_file()


def test_gc_collects_damaged_and_abandoned_files(finished):
    spoil(finished.path(1), "empty")
    finished.call("verify", "--set-aside")
    ended = 2**22 + 1  # above the largest process id
    names = {
        "ended": f".x.{ended}.abc.tmp",
        "working": f".x.{os.getpid()}.abc.tmp",
        "just left": f".y.{ended}.abc.tmp",
        "old": ".z.1.abc.tmp",
    }
    for kind, name in names.items():
        path = finished.store.folder / name
        path.write_bytes(b"part")
        age = {"just left": 0, "old": 90000}.get(kind, 7200)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    before = set(finished.files())
    status, _ = finished.call("gc", "--delete")
    gone = {Path(p).name for p in before - set(finished.files())}
    assert status == 0
    shard = finished.path(1)
    assert gone == {names["ended"], names["old"], shard.name, facts_path(shard).name}
    assert not (finished.store.folder / "damaged" / finished.path(1).name).exists()
