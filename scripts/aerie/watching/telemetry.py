"""What the supervisor sees of a job from outside: processes, memory, GPUs, disks."""

import contextlib
import math
import re
import shutil
from pathlib import Path

import psutil

from aerie.watching.diagnosis import Process, cpu_seconds, look_at
from aerie.watching.gpus import Gpus
from aerie.watching.job_status import GpuFigures
from aerie.watching.process_tree import descendants

ENGINE = re.compile(r"VLLM::|EngineCore")


class Telemetry:
    """The figures of a job at the last `look`, see `JobFigures`.

    `folders`: whose disks are watched. `lost`: engines that ended, each with when that was seen.
    `full_disk`: which disk has less than `min_free_gib` left, in words.
    """

    def __init__(self, folders: list[Path], min_free_gib: float):
        self.folders, self.min_free_gib = folders, min_free_gib
        self.gpus = Gpus()
        self.processes: list[psutil.Process] = []
        self.lost: list[tuple[float, str]] = []
        self.full_disk = ""
        self.looked = 0.0
        self.memory_gib: float | None = None
        self.cores_busy: float | None = None
        self.disk_free_gib: float | None = None
        self.gpu_figures: list[GpuFigures] = []
        self._engines: dict[int, str] = {}
        self._cpu_at_progress: dict[int, float] = {}
        self._cpu_before = 0.0

    def begin(self) -> None:
        """Find the processes, so that `mark_progress` knows their processor time so far."""
        self.processes = descendants()

    def mark_progress(self) -> None:
        """The job made progress: `look_at` counts processor time from now on."""
        self._cpu_at_progress = {p.pid: cpu_seconds(p) for p in self.processes}

    def look(self, now: float) -> None:
        before, self.looked = self.looked, now
        self.processes = descendants()
        alive = set()
        cpu = memory = 0.0
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                alive.add(process.pid)
                memory += process.memory_info().rss
                cpu += cpu_seconds(process)
                if ENGINE.search(" ".join(process.cmdline()[:1])):
                    self._engines[process.pid] = process.name()
        for pid in self._engines.keys() - alive:
            self.lost.append((now, f"{pid} ({self._engines.pop(pid)})"))
        seconds = now - before if before else math.inf
        self.memory_gib = round(memory / 2**30, 3)
        self.cores_busy = round(max(cpu - self._cpu_before, 0) / seconds, 2)
        self._cpu_before = cpu
        self._look_at_disks()
        self.gpu_figures = self.gpus.read()

    def _look_at_disks(self) -> None:
        least = None
        for folder in self.folders:
            try:
                free = shutil.disk_usage(folder).free / 2**30
            except OSError:  # not created yet, or a file server that does not answer
                continue
            least = free if least is None else min(least, free)
            if free < self.min_free_gib:
                self.full_disk = (
                    f"the disk of {folder} has {free:.2f} GiB left, less than watch.min_free_gib = "
                    f"{self.min_free_gib:g}; make room and run again, it continues from what it "
                    "kept"
                )
        self.disk_free_gib = None if least is None else round(least, 2)

    def look_at_processes(self, idle: float) -> list[Process]:
        """Their state, with the cores each kept busy in the `idle` seconds since the last
        progress."""
        return look_at(self.processes, self._cpu_at_progress, idle)


def kernel_kills() -> int | None:
    """How many processes of this control group the kernel killed because memory ran out."""
    try:
        group = Path("/proc/self/cgroup").read_text().split("::", 1)[1].strip().lstrip("/")
        for folder in (Path("/sys/fs/cgroup", group), Path("/sys/fs/cgroup")):
            events = folder / "memory.events"
            if events.is_file():
                return int(dict(map(str.split, events.read_text().splitlines()))["oom_kill"])
    except (OSError, IndexError, KeyError, ValueError):
        pass
    return None
