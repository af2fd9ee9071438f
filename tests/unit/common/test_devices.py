"""GPUs of one machine: distinct for each job, freed by a crash, and never fewer than asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.common import devices
from aerie.common.devices import take_devices, visible_devices
from aerie.common.errors import InputError
from support.paths import SCRIPTS
from support.processes import wait_until


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine of 4 GPUs."""
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "slots")
    monkeypatch.setattr(devices, "count_devices", lambda: 4)
    for name in (devices.VISIBLE, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_each_takes_its_own_and_all_or_none():
    one, two = take_devices(1), take_devices(2)
    assert (one[0], two[0]) == (["0"], ["1", "2"])
    assert take_devices(2) is None
    assert take_devices(1)[0] == ["3"]  # the vain try before left it free
    for lock in two[1]:
        os.close(lock)
    assert take_devices(2)[0] == ["1", "2"]


def test_those_given_are_what_is_chosen_from(machine):
    machine.setenv(devices.VISIBLE, "3,1")
    assert take_devices(1)[0] == ["3"]
    assert take_devices(1)[0] == ["1"]
    assert take_devices(1) is None
    machine.setenv(devices.VISIBLE, "GPU-8f2a, MIG-77/1/0")
    assert visible_devices() == ["GPU-8f2a", "MIG-77/1/0"]
    assert take_devices(2)[0] == ["GPU-8f2a", "MIG-77/1/0"]
    machine.setenv(devices.VISIBLE, "2,7,1")  # as CUDA reads it
    assert visible_devices() == ["2"]


def test_figures_are_of_those_that_the_job_sees_by_whatever_name(machine):
    from aerie.watching.gpus import Gpus

    class Nvml:
        """The first of four GPUs has a name, too."""

        class NVMLError(Exception):
            pass

        def __getattr__(self, name):
            if name == "nvmlInit":
                return lambda: None
            if name == "nvmlDeviceGetHandleByUUID":
                return lambda uuid: {"GPU-8f2a": 2}[uuid]
            if name in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetIndex"):
                return lambda same: same

            def unknown(_):
                raise self.NVMLError

            return unknown

    machine.setitem(sys.modules, "pynvml", Nvml())
    machine.setattr("aerie.watching.gpus.NVIDIA", Path("/dev/null"))  # a driver is loaded
    for given, found in ((None, [0, 1, 2, 3]), ("3,1", [3, 1]), ("GPU-8f2a", [2]), ("", [])):
        if given is None:
            machine.delenv(devices.VISIBLE, raising=False)
        else:
            machine.setenv(devices.VISIBLE, given)
        gpus = Gpus()
        assert [g.index for g in gpus.read()] == found
        assert gpus.missing == (None if found else "no GPU is visible")


@pytest.mark.parametrize(
    ("given", "found"), [("", 0), ("-1", 0), ("0", 1), (None, 4)], ids=["none", "-1", "one", "all"]
)
def test_fewer_than_asked_for_is_said_with_both_numbers(machine, given, found):
    if given is not None:
        machine.setenv(devices.VISIBLE, given)
    with pytest.raises(InputError, match=rf"asks for 5 GPU\(s\) and sees {found} \("):
        take_devices(5)


def test_what_a_scheduler_gave_is_taken_as_it_is(machine):
    machine.setenv(devices.VISIBLE, "0,1")
    assert take_devices(2)[0] == ["0", "1"]
    # Another job's own devices have the same numbers, where each sees only its own.
    machine.setenv("SLURM_JOB_ID", "7")
    assert take_devices(2) == (["0", "1"], [])
    # Several jobs of ours within one allocation.
    assert take_devices(1)[0] == ["0"]
    assert take_devices(1)[0] == ["1"]
    assert take_devices(1) is None


def supervised(folder, name, gpus, visible):
    log = folder / f"{name}.log"
    code = (
        "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(1000)"
    )
    command = [sys.executable, str(SCRIPTS / "supervise.py"), "--stage", "s", "--log", str(log)]
    process = subprocess.Popen(
        [*command, "--gpus", str(gpus), "--", sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, log


def seen(log):
    wait_until(lambda: log.is_file() and "GPU-" in log.read_text(), f"{log.name} saw no GPU")
    return log.read_text().split()[-1]


def test_supervised_jobs_have_distinct_devices_and_a_kill_frees_them(tmp_path):
    names = [f"GPU-{os.getpid()}-{i}" for i in range(2)]
    jobs = []
    try:
        for name in "ab":
            jobs.append(supervised(tmp_path, name, 1, ",".join(names)))
            assert seen(jobs[-1][1]) == names[len(jobs) - 1]
        jobs.append(supervised(tmp_path, "c", 1, ",".join(names)))
        assert "waits for 1 free GPU" in jobs[2][0].stderr.readline()
        jobs[1][0].kill()
        assert seen(jobs[2][1]) == names[1]
        process, log = supervised(tmp_path, "d", 3, ",".join(names))
        assert process.wait(timeout=120) == 1
        assert "asks for 3 GPU(s) and sees 2" in process.stderr.read()
        assert "asks for 3 GPU(s) and sees 2" in log.read_text()  # where people look
    finally:
        for process, _ in jobs:
            process.terminate()
            process.communicate(timeout=120)
        for name in names:
            (devices.Path(f"/tmp/aerie-gpus-{os.getuid()}") / f"{name}.lock").unlink()
