"""Whether a job gets on, and why it does not: its pace, its losses, processes, GPUs and stacks."""

import math
import os
import statistics
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from aerie.common.devices import visible_handles

NVIDIA = Path("/dev/nvidiactl")  # there wherever a driver is loaded
GAPS = 200  # of the last gaps the usual one is made
LOSSES = 50  # losses of a mean or median
BUSY_CORES = 0.7  # of a core, from which a process counts as computing
IDLE_CORES = 0.1
IDLE_POWER = 0.4  # share of a GPU's power limit under which full use is a spinning kernel
OVERLOAD = 3  # tasks for each core, from which a machine is overloaded
STACK_SECONDS = 20.0  # for py-spy, a process
STACKS = 16  # processes whose stacks are shown

# Pace and losses


class Pace:
    """Learns how often a job shows progress. All times in seconds of one clock.

    `usual_gap` is the gap in the middle when the last ones are laid end to end in order of their
    length: a single long one does not count much, while of a job that has a hundred answers at
    once and then none for minutes the minutes are what is usual.
    """

    def __init__(self, stall_seconds: float, stall_gaps: float, load_seconds: float, now: float):
        self.stall_seconds, self.stall_gaps = stall_seconds, stall_gaps
        self.load_seconds = load_seconds
        self.last = now
        self.steady = False
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def event(self, steady: bool, now: float) -> None:
        """Progress was seen; `steady`: the job is at work, not loading, validating or saving."""
        if self.steady:
            self._gaps.append(now - self.last)
        self.last, self.steady = now, steady

    def forget(self) -> None:
        """A model is loaded, perhaps anew: the first steps after it have no pace yet."""
        self._gaps.clear()
        self.steady = False

    def skip(self, seconds: float) -> None:
        """Leave out a time in which nothing could be seen, such as a suspended machine."""
        self.last += seconds

    def usual_gap(self) -> float | None:
        if not self._gaps:
            return None
        gaps = sorted(self._gaps)
        half, reached = sum(gaps) / 2, 0.0
        for gap in gaps:
            reached += gap
            if reached >= half:
                return gap
        return gaps[-1]

    def limit(self) -> float:
        """After how many seconds without progress the job counts as stalled."""
        usual = self.usual_gap()
        if not self.steady or usual is None:
            return self.load_seconds
        return max(self.stall_seconds, self.stall_gaps * usual)


class LossWatch:
    """Notices a loss that jumps (`spike` times the median) or grows (`divergence` times the lowest
    mean so far, over `LOSSES` losses)."""

    def __init__(self, spike: float, divergence: float):
        self.spike, self.divergence = spike, divergence
        self._recent: deque[float] = deque(maxlen=LOSSES)
        self._lowest = math.inf
        self._diverged = False

    def take(self, loss: float) -> tuple[str, str] | None:
        """`spike` or `divergence`, with words; None when the loss is as it should be."""
        found = None
        if len(self._recent) >= LOSSES // 2:
            median = statistics.median(self._recent)
            if loss > self.spike * median:
                found = "spike", f"the loss jumped to {loss:.4g}; the median before is {median:.4g}"
        self._recent.append(loss)
        if len(self._recent) < LOSSES:
            return found
        mean = statistics.fmean(self._recent)
        self._lowest = min(self._lowest, mean)
        grown = mean > self.divergence * self._lowest
        if grown and not self._diverged:
            found = (
                "divergence",
                (
                    f"the loss grows: a mean of {mean:.4g} over {LOSSES} steps, it was "
                    f"{self._lowest:.4g}; try a lower learning rate or a longer warm-up"
                ),
            )
        self._diverged = grown
        return found


# Processes and GPUs


@dataclass
class Process:
    """A process as found; `cores`: those it kept busy on average since the last progress."""

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
    """Processor time of a process so far; 0 when it is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


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
    text = " ".join([Path(words[0]).name or words[0], *words[1:]])
    return text if len(text) <= 120 else text[:117] + "..."


class Gpus:
    """Use, memory and power of the job's NVIDIA GPUs through NVML.

    `missing`: why there are no figures; None when there are, and where there is no GPU nor was
    one given to the job.
    """

    def __init__(self) -> None:
        self._handles: list[tuple[int, Any]] = []
        why = self._open()
        # Who has no GPU and was given none misses nothing.
        given = NVIDIA.exists() or os.environ.get("CUDA_VISIBLE_DEVICES")
        self.missing = why if given else None

    def _open(self) -> str | None:
        try:
            import pynvml
        except ImportError:
            return "the package nvidia-ml-py is not installed"
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = visible_handles(pynvml)
        except pynvml.NVMLError as error:
            return f"NVML: {error}"
        return None if self._handles else "no GPU is visible"

    def read(self) -> list[dict[str, Any]]:
        """A GPU each: `index`, `name`, `use_percent`, `memory_gib`, `memory_total_gib`, `power_w`,
        `power_limit_w`; null for what NVML does not tell."""
        return [self._read(index, handle) for index, handle in self._handles]

    def _read(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml

        def ask(function: Any) -> Any:
            try:
                return function(handle)
            except nvml.NVMLError:
                return None

        name = ask(nvml.nvmlDeviceGetName)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo)
        use = ask(nvml.nvmlDeviceGetUtilizationRates)
        power, limit = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        return {
            "index": index,
            "name": name.decode() if isinstance(name, bytes) else name,
            "use_percent": use and use.gpu,
            "memory_gib": memory and round(memory.used / 2**30, 2),
            "memory_total_gib": memory and round(memory.total / 2**30, 2),
            "power_w": power and round(power / 1000),
            "power_limit_w": limit and round(limit / 1000),
        }


# Diagnosis


def stacks(processes: list[psutil.Process]) -> str:
    """Stacks of all threads of the Python processes, as py-spy sees them; why where it cannot."""
    parts = []
    spy = Path(sys.executable).with_name("py-spy")
    for process in processes[:STACKS]:
        try:
            if "python" not in process.exe():
                continue
        except psutil.Error:
            continue
        try:
            # Not stopping the process: it may be stopped already, and could not be waited for.
            done = subprocess.run(
                [str(spy), "dump", "--nonblocking", "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=STACK_SECONDS,
                check=False,
            )
            text = done.stdout.strip() or f"py-spy: {done.stderr.strip()}"
        except (OSError, subprocess.TimeoutExpired) as error:
            text = f"py-spy gave no stacks of process {process.pid}: {error}"
        parts.append(text)
    return "\n\n".join(parts) or "no Python process is left"


def diagnose(
    processes: list[Process],
    gpus: list[dict[str, Any]],
    no_gpus: str | None,
    ended: list[str],
    phase: str,
) -> str:
    """In plain words why a job does not get on. `ended`: processes of it that are gone."""
    words = []
    alive = [p for p in processes if p.state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)]
    dead = [f"{p.pid} ({p.name})" for p in processes if p not in alive]
    stopped = [p for p in alive if p.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)]
    waiting = [p for p in alive if p.state == psutil.STATUS_DISK_SLEEP]
    cores = sum(p.cores for p in alive)
    busiest = max(alive, key=lambda p: p.cores, default=None)
    if stopped:
        words.append(
            f"process {_list(stopped)} was stopped by a signal (SIGSTOP or a debugger, state T) "
            "and computes nothing until it gets SIGCONT"
        )
    if dead or ended:
        words.append(
            f"process {', '.join(dead + ended)} of the job has ended, and the others wait for it"
        )
    if waiting:
        words.append(
            f"process {_list(waiting)} waits for a disk or a network file system (state D), which "
            "does not answer"
        )
    spinning = [g for g in gpus if (g["use_percent"] or 0) >= 96]
    for gpu in gpus:
        power, limit = gpu["power_w"], gpu["power_limit_w"]
        if gpu in spinning and power and limit and power < IDLE_POWER * limit:
            words.append(
                f"GPU {gpu['index']} shows {gpu['use_percent']} % use at {power} of {limit} W: a "
                "kernel that spins and waits (usually for another GPU), not work"
            )
        elif gpu in spinning:
            words.append(f"GPU {gpu['index']} computes ({gpu['use_percent']} % use, {power} W)")
    running = busiest and (busiest.cores >= BUSY_CORES or busiest.state == psutil.STATUS_RUNNING)
    if not words and running:
        words.append(
            f"process {busiest.pid} kept {busiest.cores:.1f} cores busy all the time without any "
            "progress: it loops, or one step takes that long; the stacks show where it is"
        )
    elif not words and cores <= IDLE_CORES:
        words.append(
            "all processes sleep: they wait for something that does not come (a lock, a partner, "
            "the network); the stacks show for what"
        )
    elif not words:
        words.append(
            f"the processes kept {cores:.1f} cores busy and made no progress; the stacks show what "
            "they are at"
        )
    load, number = psutil.getloadavg()[0], psutil.cpu_count() or 1
    if load > OVERLOAD * number:
        words.append(f"the machine is overloaded ({load:.0f} tasks for {number} cores)")
    if phase == "loading":
        words.append("it was loading the model")
    if gpus and not spinning:
        words.append("the GPUs are idle")
    if no_gpus:
        words.append(f"nothing is known of GPUs ({no_gpus})")
    return "; ".join(words)


def _list(processes: list[Process]) -> str:
    return ", ".join(f"{p.pid} ({p.name})" for p in processes)
