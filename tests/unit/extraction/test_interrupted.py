"""Lanes that are killed, or whose disk fills up: the next run continues, with the same result."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from aerie.extraction.work import LaneWork
from aerie.states import store as states_store
from aerie.states.facts import facts_path
from aerie.states.shard import Sample
from support.lanes import Lane, make_samples, true_states
from support.paths import ROOT, SCRIPTS


def test_a_killed_and_continued_run_writes_the_same_files_as_an_undisturbed_one(tmp_path, lane):
    lane.run()
    whole = lane.bytes()
    (tmp_path / "b").mkdir()
    other = Lane(tmp_path / "b", make_samples(60))

    def killed(n, key, states):
        if n > 40:
            raise KeyboardInterrupt
        return states

    with pytest.raises(KeyboardInterrupt):
        other.run(killed)
    assert 0 < len(other.read()) < 60
    (next(iter(other.store.folder.glob("*.json")))).unlink()  # a kill between the two files
    other.run()
    assert other.bytes() == whole


def test_a_kill_between_a_shard_and_its_facts_loses_no_reason(lane, monkeypatch):
    def refuse(n, key, states):
        return "no" if key.startswith("s17") else states

    def killed(path, left_out):
        if left_out:
            raise KeyboardInterrupt
        return real(path, left_out)

    real = states_store.write_facts
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(states_store, "write_facts", killed)
        lane.run(refuse)
    # Whether other shards were begun before the writer died depends on timing.
    assert lane.read().keys() >= {i for i in lane.shards[1].samples if i != "s17"}
    manifest = lane.run(refuse)
    assert "s17" not in lane.engine.asked
    assert manifest["quarantined"] == {"s17": "no"}
    assert manifest["samples"] == 59


def test_a_writer_killed_at_any_step_leaves_a_complete_shard_or_none(lane):
    samples = [Sample(i, torch.tensor(r.input_ids), true_states(r.input_ids))
               for i, r in list(lane.samples.items())[1:12]]  # fmt: skip
    shard, left_out = lane.shards[0], {lane.store.key(lane.samples["s0"].input_ids, []): "no"}
    path = lane.store.path(shard.id)
    states_store.write_shard(lane.store, shard.id, samples, left_out)
    whole = lane.bytes()
    steps = {"open", "tempfile.mkstemp", "os.rename", "os.remove", "os.chmod", "os.mkdir", "fsync"}
    for number in itertools.count(1):
        shutil.rmtree(lane.store.folder)
        if (child := os.fork()) == 0:
            left = [number]

            def step(event, arguments, left=left):
                if event in steps and str(lane.store.folder) in str(arguments[0]):
                    left[0] -= 1
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)

            def sync(file, real=os.fsync, step=step):
                step("fsync", [os.readlink(f"/proc/self/fd/{file}")])
                real(file)

            os.fsync = sync
            sys.addaudithook(step)
            states_store.write_shard(lane.store, shard.id, samples, left_out)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        there = path.exists()
        work = LaneWork(lane.store, lane.samples, [shard])
        assert work.missing == ([] if there else [shard])
        assert work.left_out == ({"s0": "no"} if there else {})
        if not there:
            states_store.write_shard(lane.store, shard.id, samples, left_out)
        # Temporary files stay; `store.py gc` collects them.
        assert {n: b for n, b in lane.bytes().items() if n[0] != "."} == whole
        if status == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert number > 15  # the number of steps


def test_facts_of_an_earlier_shard_with_the_same_name_are_replaced(lane, monkeypatch):
    manifest = lane.run()
    path = lane.store.path(lane.shards[1].id)
    facts = json.loads(facts_path(path).read_text())
    # As if another engine had made other states of the same size.
    facts_path(path).write_text(json.dumps({**facts, "checksum": "0" * 16}))
    path.unlink()
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(
            states_store, "write_facts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        lane.run()
    assert path.is_file()
    assert lane.run()["shards"] == manifest["shards"]


FULL = """
import resource, signal, sys
sys.path[:0] = [{scripts!r}, {tests!r}]
from pathlib import Path
from support.lanes import Lane, make_samples
from aerie.common import cli

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lane = Lane(Path({root!r}), make_samples(60))

def squeeze(n, key, states):
    if n > 40:  # limits the size of files, as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    return states

cli.run(lambda: lane.run(squeeze, limit=lane.two_shards))
"""


def test_a_full_disk_stops_the_lane_cleanly_and_the_next_run_continues(tmp_path, lane):
    code = FULL.format(scripts=str(SCRIPTS), tests=str(ROOT / "tests"), root=str(tmp_path / "full"))
    (tmp_path / "full").mkdir()
    paths = [str(SCRIPTS), str(ROOT / "tests"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the disk is full" in done.stderr
    other = Lane(tmp_path / "full", make_samples(60))
    kept = len(other.read())
    assert 0 < kept < 60
    assert not [p for p in other.store.folder.iterdir() if p.name.startswith(".")]
    assert other.run()["samples"] == 60
    assert len(other.engine.asked) == 60 - kept
