"""Two trainings of the same drafter: the second waits for the first."""

import concurrent.futures
import json
import os
import time

import pytest

from aerie.common.errors import InputError
from aerie.common.leases import Leases, lease_path
from aerie.common.progress import JobProgress
from aerie.drafter import train
from support.processes import wait_until


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "POLL_SECONDS", 0.02)
    made = tmp_path / "drafters" / "key"
    made.mkdir(parents=True)
    return made


def take(folder, log=None):
    with Leases() as leases, JobProgress("train_drafter", 0, "steps", log, "loading") as bar:
        train.take_training(folder, leases, bar)
        return lease_path(folder).is_file()


def test_the_second_waits_and_uses_what_the_first_made(folder, tmp_path, capsys):
    log = tmp_path / "progress.jsonl"
    with Leases() as first, concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert first.take(folder)
        second = pool.submit(take, folder, log)

        def beats():
            *lines, _ = log.read_text().split("\n") if log.is_file() else [""]
            found = [json.loads(line) for line in lines]
            return {line["beats"] for line in found if line["phase"] == "waiting"}

        # Signs of life, about once a second: waiting is not a stall.
        wait_until(lambda: len(beats()) >= 3, "it gives no sign of life")
        assert not second.done()
        (folder / "done.json").write_text("{}")
        second.result(timeout=60)
    assert f"process {os.getpid()} on " in capsys.readouterr().out


def test_the_second_continues_when_the_first_has_failed(folder):
    with Leases() as first, concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert first.take(folder)
        second = pool.submit(take, folder)
        time.sleep(0.2)
        first.release(folder)
        assert second.result(timeout=60)


def test_a_training_on_several_gpus_does_not_wait(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Leases() as first:
        assert first.take(folder)
        with pytest.raises(
            InputError, match=rf"process {os.getpid()} .*is training this very drafter"
        ):
            take(folder)
