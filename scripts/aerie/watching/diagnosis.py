"""Why a job makes no progress: its processes, GPUs and stacks, and what they mean in words."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from aerie.common.text import shorten
from aerie.watching.job_status import GpuFigures

BUSY_CORES = 0.7  # of a core, from which a process counts as computing
IDLE_CORES = 0.1
IDLE_POWER = 0.4  # share of a GPU's power limit below which full use is a spinning kernel
FULL_USE = 96  # % of a GPU, from which it counts as busy all the time
OVERLOAD = 3  # tasks for each core, from which a machine is overloaded
STACK_SECONDS = 20.0  # for py-spy, each process
STACKS = 16  # processes whose stacks are shown


@dataclass
class Process:
    """A process as found; `cores`: kept busy on average since the last progress."""

    pid: int
    name: str
    state: str
    cores: float
    memory_gib: float

    def __str__(self) -> str:
        return (
            f"{self.pid:>8}  {self.state:<12}  {self.cores:5.2f} cores  "
            f"{self.memory_gib:6.2f} GiB  {self.name}"
        )


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time of a process so far; 0 when it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def look_at(
    processes: list[psutil.Process], before: dict[int, float], seconds: float
) -> list[Process]:
    """Their state now. `before`: processor time by id, as it was `seconds` ago."""
    found = []
    for process in processes:
        try:
            with process.oneshot():
                cores = (cpu_seconds(process) - before.get(process.pid, 0.0)) / max(seconds, 0.1)
                state = process.status()
                name = process.name() if state == psutil.STATUS_ZOMBIE else _title(process)
                memory = 0 if state == psutil.STATUS_ZOMBIE else process.memory_info().rss
        except psutil.Error:
            continue
        found.append(Process(process.pid, name, state, max(cores, 0.0), memory / 2**30))
    return found


def _title(process: psutil.Process) -> str:
    words = process.cmdline() or [process.name()]
    return shorten(" ".join([Path(words[0]).name or words[0], *words[1:]]), 120)


def stacks(processes: list[psutil.Process]) -> str:
    """Stacks of all threads of the Python processes from py-spy, or why it has none."""
    parts = []
    spy = Path(sys.executable).with_name("py-spy")
    for process in processes[:STACKS]:
        try:
            if "python" not in process.exe():
                continue
        except psutil.Error:
            continue
        try:
            # Nonblocking: a process that is stopped already could not be waited for.
            done = subprocess.run(
                [str(spy), "dump", "--nonblocking", "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=STACK_SECONDS,
                check=False,
            )
            text = done.stdout.strip() or f"py-spy: {done.stderr.strip()}"
        except (OSError, subprocess.TimeoutExpired) as error:
            text = f"py-spy returned no stacks of process {process.pid}: {error}"
        parts.append(text)
    return "\n\n".join(parts) or "no Python process is left"


def diagnose(
    processes: list[Process],
    gpus: list[GpuFigures],
    no_gpus: str | None,
    ended: list[str],
    phase: str,
) -> str:
    """Why a job makes no progress, in words. `ended`: processes of it that are gone."""
    words = _faults(processes, ended) + _busy_gpus(gpus)
    words = words or [_what_they_do(processes)]
    load, number = psutil.getloadavg()[0], psutil.cpu_count() or 1
    if load > OVERLOAD * number:
        words.append(f"the machine is overloaded ({load:.0f} tasks for {number} cores)")
    if phase == "loading":
        words.append("it was loading the model")
    if gpus and not any(map(_is_full, gpus)):
        words.append("the GPUs are idle")
    if no_gpus:
        words.append(f"nothing is known of GPUs ({no_gpus})")
    return "; ".join(words)


def _is_alive(process: Process) -> bool:
    return process.state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _faults(processes: list[Process], ended: list[str]) -> list[str]:
    """Processes that are stopped, dead or blocked."""
    words = []
    dead = [f"{p.pid} ({p.name})" for p in processes if not _is_alive(p)]
    stopped = [
        p for p in processes if p.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    ]
    blocked = [p for p in processes if p.state == psutil.STATUS_DISK_SLEEP]
    if stopped:
        words.append(
            f"process {_list(stopped)} was stopped by a signal (SIGSTOP or a debugger, state T) "
            "and computes nothing until it gets SIGCONT"
        )
    if dead or ended:
        words.append(
            f"process {', '.join(dead + ended)} of the job has ended, and the others wait for it"
        )
    if blocked:
        words.append(
            f"process {_list(blocked)} waits for a disk or a network file system (state D), which "
            "does not answer"
        )
    return words


def _is_full(gpu: GpuFigures) -> bool:
    return (gpu.use_percent or 0) >= FULL_USE


def _busy_gpus(gpus: list[GpuFigures]) -> list[str]:
    words = []
    for gpu in filter(_is_full, gpus):
        if gpu.power_w and gpu.power_limit_w and gpu.power_w < IDLE_POWER * gpu.power_limit_w:
            words.append(
                f"GPU {gpu.index} shows {gpu.use_percent} % use at {gpu.power_w} of "
                f"{gpu.power_limit_w} W: a kernel that spins and waits (usually for another GPU), "
                "not work"
            )
        else:
            words.append(f"GPU {gpu.index} computes ({gpu.use_percent} % use, {gpu.power_w} W)")
    return words


def _what_they_do(processes: list[Process]) -> str:
    """What processes without a fault do."""
    alive = list(filter(_is_alive, processes))
    cores = sum(p.cores for p in alive)
    busiest = max(alive, key=lambda p: p.cores, default=None)
    if busiest and (busiest.cores >= BUSY_CORES or busiest.state == psutil.STATUS_RUNNING):
        return (
            f"process {busiest.pid} kept {busiest.cores:.1f} cores busy all the time without any "
            "progress: it loops, or one step takes that long; the stacks show where it is"
        )
    if cores <= IDLE_CORES:
        return (
            "all processes sleep: they wait for something that does not come (a lock, a partner, "
            "the network); the stacks show for what"
        )
    return (
        f"the processes kept {cores:.1f} cores busy and made no progress; the stacks show what "
        "they are doing"
    )


def _list(processes: list[Process]) -> str:
    return ", ".join(f"{p.pid} ({p.name})" for p in processes)
