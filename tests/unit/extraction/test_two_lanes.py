"""Two lanes that work on the same shards of one store."""

import concurrent.futures
import os
import threading
import time

from aerie.common.leases import Leases, lease_path
from aerie.common.progress import JobProgress
from aerie.extraction import extractor
from support.lanes import Lane, refusing


def waiting_lane(lane, monkeypatch, name="other"):
    """A second lane with the same shards and a staging folder of its own."""
    monkeypatch.setattr(extractor, "POLL_SECONDS", 0.05)
    return Lane(lane.folder.parent, list(lane.samples.values()), folder=name)


def at_once(both):
    """A `spoil` that waits until the other lane has an engine too, and then answers slowly."""
    begun = []

    def slowly(n, key, states):
        if not begun:
            begun.append(key)
            both.wait(timeout=120)
        time.sleep(0.02)
        return states

    return slowly


def test_two_lanes_of_one_store_share_the_work_and_extract_nothing_twice(lane, monkeypatch):
    other, both = waiting_lane(lane, monkeypatch), threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(x.run, at_once(both)) for x in (lane, other)]
        one, two = (x.result() for x in runs)
    assert sorted(lane.engine.asked + other.engine.asked) == sorted(lane.samples)
    assert one["shards"] == two["shards"]
    assert one["samples"] == len(lane.samples)
    assert one["extracted_samples"] + one["adopted_samples"] == len(lane.samples)
    assert two["adopted_samples"] == one["extracted_samples"] > 0
    assert not list(lane.store.folder.glob(".*"))


def test_a_lane_waits_for_shards_of_another_and_starts_no_engine(lane, monkeypatch, capsys):
    other = waiting_lane(lane, monkeypatch)
    whole = lane.run()
    for shard in lane.shards[1:]:
        lane.store.path(shard.id).rename(lane.store.path(shard.id).with_suffix(".later"))
    phases = []

    class Watched(JobProgress):
        def enter(self, phase):
            phases.append(phase)
            super().enter(phase)

    def make_the_rest():
        while "waiting" not in phases:
            time.sleep(0.01)
        for shard in lane.shards[1:]:
            path = lane.store.path(shard.id)
            path.with_suffix(".later").rename(path)
            holder.release(path)

    with Leases() as holder, concurrent.futures.ThreadPoolExecutor(1) as pool:
        for shard in lane.shards[1:]:
            assert holder.take(lane.store.path(shard.id))
        pool.submit(make_the_rest)
        done = other.run(progress=Watched("test", 60, "samples"))
    assert other.engine.started == 0
    assert done["shards"] == whole["shards"]
    assert f"process {os.getpid()} on " in capsys.readouterr().out


def test_two_lanes_that_hold_shards_without_usable_samples_do_not_wait_for_each_other(
    lane, monkeypatch
):
    """Each holds its lease until its own work is done, and then waits for the other."""
    other = waiting_lane(lane, monkeypatch)
    refuse = refusing(*lane.shards[::2])

    def slow_refuse(n, key, states):
        time.sleep(0.01)
        return refuse(n, key, states)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(x.run, slow_refuse, floor=0.1) for x in (lane, other)]
        one, two = (x.result(timeout=60) for x in running)
    assert (
        one["quarantined"]
        == two["quarantined"]
        == dict.fromkeys((i for s in lane.shards[::2] for i in s.samples), "no")
    )
    asked = [key for key in lane.engine.asked + other.engine.asked if not key.endswith("-again")]
    assert sorted(asked) == sorted(lane.samples)
    assert one["samples"] == two["samples"] == 24
    assert one["extracted_samples"] + one["adopted_samples"] == 24


def test_shards_of_a_lane_that_is_gone_are_taken_over(lane, monkeypatch):
    monkeypatch.setattr("aerie.common.leases.EXPIRY_SECONDS", 0.3)
    other = waiting_lane(lane, monkeypatch)
    lane.store.folder.mkdir(parents=True)
    for shard in lane.shards:
        lease = lease_path(lane.store.path(shard.id))
        lease.write_text('{"machine": "another", "process": 1, "token": "x"}')
    done = other.run()
    assert done["extracted_samples"] == len(lane.samples)
    assert not list(lane.store.folder.glob(".*"))
