"""GPUs for the jobs of one machine, where no scheduler assigns them: each job locks free ones and
gets their names in CUDA_VISIBLE_DEVICES.

A slot is a locked file in a folder of this machine. The kernel frees it when its job has ended,
whatever the reason.
"""

import fcntl
import os
import subprocess
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError

FOLDER = Path(f"/tmp/aerie-gpus-{os.getuid()}")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_devices() -> int:
    """NVIDIA GPUs of this machine: by NVML, else by nvidia-smi, else none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        pass
    else:
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def visible_devices() -> list[str]:
    """Devices that a job may use, as CUDA_VISIBLE_DEVICES names them; all when it is not set."""
    count = count_devices()
    given = os.environ.get(VISIBLE)
    if given is None:
        return [str(i) for i in range(count)]
    found = []
    for name in map(str.strip, given.split(",")):
        # As in CUDA: devices after one that does not exist are ignored.
        if not name or name == "-1" or (count and name.isdigit() and int(name) >= count):
            break
        found.append(name)
    return found


def visible_handles(nvml: Any) -> list[tuple[int, Any]]:
    """NVML's number and handle of each visible device; `nvml`: the module pynvml, initialised."""
    found = []
    for name in visible_devices():
        if name.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        found.append((nvml.nvmlDeviceGetIndex(handle), handle))
    return found


def take_devices(wanted: int) -> tuple[list[str], list[int]] | None:
    """Names of devices that are now ours, and the open files that lock them; None: too few free.

    Raises `InputError` when fewer than `wanted` exist.
    """
    devices = visible_devices()
    if len(devices) < wanted:
        given = os.environ.get(VISIBLE)
        what = f"{VISIBLE} is {given!r}" if given is not None else f"{VISIBLE} is not set"
        raise InputError(
            f"the job asks for {wanted} GPU(s) and sees {len(devices)} ({what}); lower "
            "engine.tensor_parallel_size or drafters.<name>.gpus, or run it where there are enough"
        )
    # A scheduler's job has its devices to itself, and numbers them in its own way.
    job = os.environ.get("SLURM_JOB_ID", "")
    if job and len(devices) == wanted:
        return devices, []
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    taken: list[str] = []
    locks: list[int] = []
    for name in devices:
        slot = f"{job}-{name}" if job else name
        lock = os.open(FOLDER / f"{slot.replace('/', '_')}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        taken.append(name)
        locks.append(lock)
        if len(taken) == wanted:
            return taken, locks
    for lock in locks:
        os.close(lock)
    return None
