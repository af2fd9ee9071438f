"""Leases: one holder at a time, none that outlives its holder, on any file system."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest

from aerie.common import leases
from aerie.common.leases import Leases, lease_path
from support.paths import SCRIPTS
from support.processes import Clock, wait_until


@pytest.fixture
def thing(tmp_path):
    return tmp_path / "store" / "shard"


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(leases, "time", made)
    return made


def test_one_of_two_has_it_until_it_is_released(thing):
    with Leases() as one, Leases() as two:
        assert one.take(thing)
        assert one.take(thing)
        assert not two.take(thing)
        assert f"process {os.getpid()} on " in two.holder(thing)
        one.release(thing)
        assert two.holder(thing) is None
        assert two.take(thing)
        assert not one.take(thing)
    assert list(thing.parent.iterdir()) == []


def test_of_many_at_once_one_has_it(thing):
    start, got = threading.Barrier(16), []

    def take():
        mine = Leases()
        start.wait()
        got.append(mine.take(thing))

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(got) == 1


def test_the_lease_of_a_killed_process_is_free_at_once(thing):
    code = (
        "import sys, time; from pathlib import Path; from aerie.common.leases import Leases\n"
        "print(Leases().take(Path(sys.argv[1])), flush=True); time.sleep(1000)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(thing)],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "True\n"
    with Leases() as mine:
        assert not mine.take(thing)
        other.kill()
        other.wait()
        assert mine.take(thing)


def elsewhere(thing, **changes):
    """A lease of a machine that is not this one."""
    thing.parent.mkdir(exist_ok=True)
    who = {"machine": "node7 x y", "process": 1, "started": 0.0, "token": "theirs", **changes}
    lease_path(thing).write_text(json.dumps(who))


def test_a_lease_of_another_machine_counts_as_long_as_it_is_renewed(thing, clock):
    elsewhere(thing)
    with Leases() as mine:
        for _ in range(8):
            assert not mine.take(thing)
            assert mine.holder(thing) == "process 1 on node7"
            clock.sleep(leases.EXPIRY_SECONDS / 3)
            # Its clock is an hour slow.
            os.utime(lease_path(thing), (clock.time() - 3600,) * 2)
        assert not mine.take(thing)
        clock.sleep(leases.EXPIRY_SECONDS)
        assert not mine.take(thing)
        clock.sleep(1)
        assert mine.take(thing)


def test_a_lease_cut_short_by_a_crash_expires(thing, clock):
    thing.parent.mkdir()
    lease_path(thing).write_text("")
    with Leases() as mine:
        assert not mine.take(thing)
        clock.sleep(leases.EXPIRY_SECONDS + 1)
        assert mine.take(thing)


def test_held_leases_are_renewed_and_one_that_was_taken_over_is_noticed(thing, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)
    with Leases() as mine:
        assert mine.take(thing)
        first = lease_path(thing).stat().st_mtime_ns
        wait_until(lambda: lease_path(thing).stat().st_mtime_ns > first, "it is not renewed")
        assert not mine.lost(thing)
        elsewhere(thing)
        wait_until(lambda: mine.lost(thing), "the loss is not noticed")
    assert "theirs" in lease_path(thing).read_text()  # not ours to remove


def test_a_fresh_lease_is_not_removed_for_a_stale_one(thing):
    elsewhere(thing)
    with Leases() as mine:
        stale = mine._read(lease_path(thing))
        elsewhere(thing, token="fresh")
        mine._remove(lease_path(thing), stale)
        assert "fresh" in lease_path(thing).read_text()


def test_where_no_lease_can_be_written_the_work_is_done_all_the_same(thing, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "read-only")

    with Leases() as mine:
        monkeypatch.setattr(leases.os, "open", refuse)
        assert mine.take(thing)


def test_another_process_of_the_same_number_has_no_lease(thing):
    thing.parent.mkdir()
    with Leases() as first:
        assert first.take(thing)
        who = json.loads(lease_path(thing).read_text())
    lease_path(thing).write_text(json.dumps(who))
    with Leases() as mine:
        assert not mine.take(thing)
        lease_path(thing).write_text(json.dumps({**who, "started": who["started"] - 1}))
        assert mine.take(thing)
