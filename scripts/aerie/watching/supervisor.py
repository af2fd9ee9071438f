"""A long job under supervision: its output in a log, its state in a file, ended when it stalls.

Three processes. The one in front stays with its caller and passes signals on; behind it, in
sessions of their own, the supervisor and the job. Whichever is killed, another ends what is left:

    front       sees the end of the supervisor, or of Snakemake, and ends the rest
    supervisor  is told by the kernel when the front one dies, and ends the job
    job         is killed by the kernel when the supervisor dies

Front and supervisor adopt orphans (PR_SET_CHILD_SUBREAPER), so the job's processes are always
their descendants, also those that changed their process group.
"""

import contextlib
import ctypes
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from aerie.common.errors import EXIT_PERMANENT, EXIT_STALLED, PERMANENT, InputError
from aerie.common.files import digest, read_json
from aerie.common.paths import LOG_PATTERNS
from aerie.common.signals import next_signal
from aerie.common.text import shorten
from aerie.config import Watch
from aerie.watching import notify
from aerie.watching.diagnosis import Gpus, LossWatch, Pace, cpu_seconds, diagnose, look_at, stacks
from aerie.watching.triage import Catalogue, Triage

STALLED = EXIT_STALLED
"""Exit status (sysexits' EX_TEMPFAIL) of a job that did not get on; run again, it goes on from
what it kept."""
STOPPED = EXIT_PERMANENT
"""Exit status of a job stopped for what running again does not mend: its loss, a full disk."""
SNAKEMAKE = "AERIE_SNAKEMAKE"
"""Environment variable with the id of the Snakemake process whose end ends the job."""
SESSION = "AERIE_SESSION"
"""Environment variable with a name for the run of Snakemake, the same on all machines."""

STATUS_SECONDS = 3.0  # between two looks at the job's processes
TICK_SECONDS = 1.0
BAR_SECONDS = 10.0  # between two lines of a progress bar in the log
ENGINE_SECONDS = 20.0  # from the end of an engine's process until the job is stopped, if it is not
LONGEST_LINE = 1 << 16  # bytes
LONGEST_LOG = 1 << 26  # bytes of a job's output; what comes after is judged, and not kept
JUDGED_LINES = 2000  # between two looks; of a job that floods its log the last ones
JUDGED_BYTES = 1 << 12  # of a line
LAST_LINES = 20
ALERTS = 20

GONE = signal.SIGUSR1  # to us: who started the job is gone, or ends
SIGNALS = {signal.SIGCHLD, GONE}
# Those that our caller has us ignore (nohup) stay ignored; blocked ones would be received.
SIGNALS |= {
    s
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if signal.getsignal(s) is not signal.SIG_IGN
}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BAR = re.compile(rb"\d%|\d/\d|\dit/s|\ds/it")
COMPILING = re.compile(r"torch\.compile|Capturing CUDA graph|Dynamo bytecode")
ENGINE = re.compile(r"VLLM::|EngineCore")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Job:
    """What is run, and where its output, progress and status go.

    `disks`: folders it writes to, whose free space is watched.
    """

    command: list[str]
    stage: str
    log: Path
    progress: Path
    status: Path
    disks: list[Path] = field(default_factory=list)


# The process in front


def supervise(job: Job, watch: Watch) -> int:
    """Run the job to its end; its exit status, 128 + the signal that killed it, or ours.

    Call it from the main thread of a process that does nothing else.
    """
    if why := _failed_for_good(job):
        words = f"not tried again in this run, it would fail of the same: {why}"
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.write_text(f"supervisor: {words}\n")
        print(f"{job.stage} {words}\nlog: {job.log.with_suffix('.failed.log')}", file=sys.stderr)
        return EXIT_PERMANENT
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    snakemake = starter()
    front = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = os.fork()
    if supervisor == 0:
        status = 70
        try:
            os.setsid()
            _die_with(front, GONE)
            status = Supervisor(job, watch).run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    while True:
        received = next_signal(SIGNALS, TICK_SECONDS)
        if received not in (None, signal.SIGCHLD):
            os.kill(supervisor, received)
        if snakemake is not None and has_ended(snakemake):
            snakemake = None
            os.kill(supervisor, GONE)
        ended = reap()
        if supervisor in ended:
            left = end_processes(0)
            status = exit_status(ended[supervisor])
            if left or ended[supervisor] < 0:
                print(
                    f"{job.stage}: the supervisor ended before its job (status {status}); ended "
                    f"the job's processes {left}",
                    file=sys.stderr,
                )
            return status


def _attempt_of(job: Job) -> str | None:
    """What two attempts at a job in one run of Snakemake have in common; None without one."""
    session = os.environ.get(SESSION)
    return digest(job.command, session) if session else None


def _failed_for_good(job: Job) -> str | None:
    """Why an attempt at this job in this run of Snakemake failed, when another would too."""
    with contextlib.suppress(InputError):
        before = read_json(job.status)
        if isinstance(before, dict) and before.get("exit") in PERMANENT:
            key = _attempt_of(job)
            if key is not None and before.get("attempt_of") == key:
                return str(before.get("reason"))
    return None


def starter() -> psutil.Process | None:
    """The Snakemake that started this, when it said so and is still there."""
    number = os.environ.get(SNAKEMAKE, "")
    return next((p for p in psutil.Process().parents() if str(p.pid) == number), None)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _die_with(parent: int, with_signal: int) -> None:
    """Have the kernel send this process a signal when `parent` dies."""
    _libc.prctl(PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


# Processes


def descendants() -> list[psutil.Process]:
    """All processes below this one; those of the job, orphans included."""
    return psutil.Process().children(recursive=True)


def reap() -> dict[int, int]:
    """Ids of the children that ended since the last call, with how, as `Popen.returncode` is."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def exit_status(code: int) -> int:
    """What a shell calls it: 128 + the number of a signal."""
    return code if code >= 0 else 128 - code


def end_processes(grace: float, ended: dict[int, int] | None = None) -> list[int]:
    """End all descendants: ask, and kill those that are left after `grace` seconds, or at a further
    signal to us. Returns their ids; `ended` takes up how they ended."""
    ended = {} if ended is None else ended
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while left := descendants():
        ended.update(reap())
        kill = time.monotonic() >= deadline
        for process in left:
            if process.pid in asked and not kill:
                continue
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
            asked.add(process.pid)
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
                # One that is stopped takes a signal only when it goes on.
                process.send_signal(signal.SIGCONT)
        if next_signal(SIGNALS, 0.1) not in (None, signal.SIGCHLD, GONE):
            deadline = min(deadline, time.monotonic())
        ended.update(reap())
        if time.monotonic() > deadline + 10:
            break  # in state D nothing can be killed
    return sorted(asked)


# Output


class Pump(threading.Thread):
    """Copies a job's output into its log: lines with their time, progress bars folded.

    Never stops for a log that cannot be written: the job would hang. Neither memory nor disk is
    filled by a job that floods its output. `skipped`: lines that `take` did not return, because
    there were too many; `full`: the log has taken all that it takes.
    """

    def __init__(self, source: int, log: Path):
        super().__init__(name="pump", daemon=True)
        self.source = source
        self.log = log.open("wb", buffering=0)
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self.skipped = 0
        self.full = False
        self._fresh: deque[str] = deque(maxlen=JUDGED_LINES)
        self._written = 0
        self._rest = b""
        self._bar_shown = 0.0
        self._lock = threading.Lock()

    def run(self) -> None:
        while data := os.read(self.source, 1 << 16):
            *lines, rest = (self._rest + data).split(b"\n")
            lines = [part for line in lines for part in fold(line)]
            if b"\r" in rest:
                *drawn, rest = rest.split(b"\r")
                *others, bar = fold(b"\r".join(drawn))
                lines += others
                if not BAR.search(bar) or time.monotonic() - self._bar_shown >= BAR_SECONDS:
                    self._bar_shown = time.monotonic()
                    lines += [bar] * bool(bar)
            if len(rest) > LONGEST_LINE:
                lines.append(rest)
                rest = b""
            self._rest = rest
            self.write(lines)
        if self._rest:
            self.write(fold(self._rest))

    def write(self, lines: list[bytes], mine: bool = False) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ").encode()
        if mine:
            stamp += b"supervisor: "
        with self._lock:
            if mine or not self.full:
                with contextlib.suppress(OSError):
                    data = b"".join(stamp + line + b"\n" for line in lines)
                    self._written += self.log.write(data)
            if mine:
                return
            if not self.full and self._written > LONGEST_LOG:
                self.full = True
                note = f"supervisor: the log has {LONGEST_LOG >> 20} MiB, no more of it is kept\n"
                with contextlib.suppress(OSError):
                    self.log.write(stamp + note.encode())
            texts = [line[:JUDGED_BYTES].decode(errors="replace") for line in lines]
            self.last.extend(texts)
            self.skipped += max(len(self._fresh) + len(texts) - JUDGED_LINES, 0)
            self._fresh.extend(texts)

    def say(self, text: str) -> None:
        """Lines of the supervisor's own."""
        self.write(text.encode().split(b"\n"), mine=True)

    def take(self) -> list[str]:
        with self._lock:
            fresh = list(self._fresh)
            self._fresh.clear()
        return fresh


def fold(line: bytes) -> list[bytes]:
    """A line as it stands in the end, where carriage returns drew a progress bar over itself; what
    was drawn over and is no bar comes before."""
    if b"\r" not in line:
        return [line]
    *over, last = [part for part in line.split(b"\r") if part.strip()] or [b""]
    return [*(part for part in over if not BAR.search(part)), last]


# The supervisor


class Stop(Exception):
    """The job is to be stopped: `state` for the status file, why, and our exit status."""

    def __init__(self, state: str, why: str, status: int):
        super().__init__(why)
        self.state, self.why, self.status = state, why, status


class Supervisor:
    """Starts the job, follows it, writes its status, stops it when it must not go on."""

    def __init__(self, job: Job, watch: Watch):
        self.job, self.watch = job, watch
        limits = watch.stages.get(job.stage)
        stall, load = watch.stall_seconds, watch.load_seconds
        if limits is not None:
            stall, load = limits.stall_seconds or stall, limits.load_seconds or load
        self.pace = Pace(stall, watch.stall_gaps, load, time.monotonic())
        self.losses = LossWatch(watch.loss_spike, watch.loss_divergence)
        self.gpus = Gpus()
        self.judge = _judge()
        self.alerts: deque[str] = deque(maxlen=ALERTS)
        self.warnings: Counter[str] = Counter()
        self.progress: dict[str, Any] = {}
        self.compiling = False
        self.ended: dict[int, int] = {}
        self._signature: Any = None
        self._done: deque[tuple[float, float]] = deque(maxlen=600)
        self._offset = job.progress.stat().st_size if job.progress.is_file() else 0
        self._partial = b""
        self._processes: list[psutil.Process] = []
        self._engines: dict[int, str] = {}
        self._lost: list[tuple[float, str]] = []
        self._cpu: dict[int, float] = {}  # processor time at the last progress
        self._cpu_before = 0.0
        self._looked = 0.0
        self._figures: dict[str, Any] = {"gpus": []}
        self._kills = _kernel_kills()

    def run(self) -> int:
        job = self.job
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        for path in (job.log, job.progress, job.status):
            path.parent.mkdir(parents=True, exist_ok=True)
        me = os.getpid()

        def in_child() -> None:
            _die_with(me, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        reading, writing = os.pipe()
        self.started = time.time()
        try:
            process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=in_child,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            job.log.write_text(f"{job.command[0]} cannot be run: {error}\n")
            print(f"{job.stage}: {job.command[0]} cannot be run: {error}", file=sys.stderr)
            return 127
        os.close(writing)
        self.pid = process.pid
        self.pump = Pump(reading, job.log)
        self.pump.start()
        try:
            self._follow()
            state, why, status = self._judge_end()
        except Stop as stop:
            state, why, status = stop.state, stop.why, stop.status
        self._write_status("ending", why)
        if state in ("stalled", "stopped"):
            self._explain(state, why, status)
        self._wait_for_children(2 if state in ("done", "failed") else 0)
        left = end_processes(self.watch.grace_seconds, self.ended)
        process.returncode = self.ended.get(self.pid, 0)
        if left and state in ("done", "failed"):
            self.pump.say(f"ended processes that the job left behind: {left}")
        self._hear_out()
        if self.pump.full and state == "failed":
            self.pump.say("last lines of the job:\n" + "\n".join(self.pump.last))
        seconds = time.time() - self.started
        self.pump.say(f"{state} after {seconds:.0f} s, status {status}" + (f": {why}" * bool(why)))
        self._write_status(state, why, status)
        if status in (STALLED, STOPPED):
            self._notify(state, why)
        if state != "done":
            # Snakemake removes the log before it tries again.
            with contextlib.suppress(OSError):
                shutil.copyfile(job.log, job.log.with_suffix(".failed.log"))
            print(f"{job.stage} {state}: {why}\nlog: {job.log}", file=sys.stderr)
        return status

    def _follow(self) -> None:
        """Return when the job has ended; raise `Stop` when it is to be stopped."""
        tick = time.monotonic()
        self._processes = descendants()  # their time so far is known when the first progress comes
        while True:
            received = next_signal(SIGNALS, TICK_SECONDS)
            now = time.monotonic()
            if now - tick > 10 * TICK_SECONDS:
                self.pace.skip(now - tick)  # it was us who did not run
            tick = now
            self.ended.update(reap())
            if self.pid in self.ended:
                self._read_progress(now)
                return
            if received not in (None, signal.SIGCHLD):
                if received == GONE:
                    raise Stop("stopped", "who started it is gone, or ends", 128 + signal.SIGTERM)
                name = signal.Signals(received).name
                raise Stop("stopped", f"{name} received", 128 + received)
            self._read_progress(now)
            if now - self._looked >= STATUS_SECONDS:
                self._look_and_tell(now)
            self._check_engines(now)
            idle = now - self.pace.last
            if idle > self.pace.limit():
                if self._looked < now:
                    self._look_and_tell(now)
                raise Stop("stalled", self._why_stalled(idle), STALLED)

    def _wait_for_children(self, seconds: float) -> None:
        """Helpers of Python's (a resource tracker) end by themselves after their job."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and descendants():
            self.ended.update(reap())
            time.sleep(0.05)

    # What the job says

    def _read_progress(self, now: float) -> None:
        try:
            with self.job.progress.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                self._take(line, now)

    def _take(self, line: dict[str, Any], now: float) -> None:
        self.progress.update(line)
        signature = {k: v for k, v in line.items() if k not in ("time", "rate")}
        if signature == self._signature:
            return
        self._signature = signature
        phase, done, total = line.get("phase", "working"), line.get("done"), line.get("total")
        if phase in ("loading", "compiling"):
            self.pace.forget()
        else:
            self.compiling = False
        # What comes after the last unit has no pace of its own.
        self.pace.event(phase == "working" and not (total and done == total), now)
        self._cpu = {p.pid: cpu_seconds(p) for p in self._processes}
        if done is not None and (not self._done or self._done[-1][1] != done):
            if self._done and done < self._done[-1][1]:
                self._done.clear()
            if self._done and self._done[-1][0] == now:
                self._done.pop()  # of what is read at once only the last was done just now
            self._done.append((now, done))
        if isinstance(line.get("loss"), int | float):
            self._take_loss(float(line["loss"]))

    def _take_loss(self, loss: float) -> None:
        if not math.isfinite(loss) or loss == 0:
            raise Stop("stopped", f"the loss is {loss:g}", STOPPED)
        found = self.losses.take(loss)
        if found is not None:
            kind, words = found
            self._alert(f"loss {kind}", words)
            if kind == "divergence" and self.watch.stop_on_divergence:
                raise Stop("stopped", words, STOPPED)

    def _alert(self, kind: str, words: str) -> None:
        self.warnings[kind] += 1
        self.alerts.append(words)
        self.pump.say(f"WARNING: {words}")

    def _read_log(self) -> None:
        lines = self.pump.take()
        if self.phase() == "loading" and any(map(COMPILING.search, lines)):
            self.compiling = True
        if self.judge is not None and lines:
            self.judge.feed("\n".join(lines) + "\n")

    def _hear_out(self) -> None:
        """Take in the job's last words; only processes that it left could hold its output open."""
        self.pump.join(2 if descendants() else 20)
        self._read_log()

    def phase(self) -> str:
        """What the job is at, as it says itself; `loading` until it says anything."""
        phase = self.progress.get("phase", "loading" if not self.progress else "working")
        return "compiling" if self.compiling else phase

    # What can be seen of it

    def _look_and_tell(self, now: float) -> None:
        try:
            self._look(now)
            self._write_status("running", "")
        except Stop:
            raise
        except Exception as error:
            # A job of days is worth more than a look at it: a driver that fails must not end it.
            words = f"the supervisor could not look at the job: {error!r}"
            if words not in self.alerts:
                self._alert("not seen", words)

    def _look(self, now: float) -> None:
        """Look at log, processes, GPUs and disks."""
        self._read_log()
        before, self._looked = self._looked, now
        self._processes = descendants()
        alive = set()
        cpu = memory = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                alive.add(process.pid)
                memory += process.memory_info().rss
                cpu += cpu_seconds(process)
                if ENGINE.search(" ".join(process.cmdline()[:1])):
                    self._engines[process.pid] = process.name()
        for pid in self._engines.keys() - alive:
            self._lost.append((now, f"{pid} ({self._engines.pop(pid)})"))
        seconds = now - before if before else math.inf
        self._figures = {
            "memory_gib": round(memory / 2**30, 3),
            "cores_busy": round(max(cpu - self._cpu_before, 0) / seconds, 2),
            "disk_free_gib": self._free_gib(),
            "gpus": self.gpus.read(),
        }
        self._cpu_before = cpu

    def _free_gib(self) -> float | None:
        """The least free space of the disks the job writes to; stops it when that is too little."""
        least = None
        for folder in (self.job.log.parent, *self.job.disks):
            try:
                free = shutil.disk_usage(folder).free / 2**30
            except OSError:  # not made yet, or a file server that does not answer
                continue
            least = free if least is None else min(least, free)
            if free < self.watch.min_free_gib:
                raise Stop(
                    "stopped",
                    f"the disk of {folder} has {free:.2f} GiB left, under watch.min_free_gib = "
                    f"{self.watch.min_free_gib:g}; make room and run again, it goes on from "
                    "what it kept",
                    STOPPED,
                )
        return None if least is None else round(least, 2)

    def _check_engines(self, now: float) -> None:
        """An engine whose process has died; its job should notice, but does not always."""
        # A job that got on without it had no more need of it; its last words may come after it.
        self._lost = [(t, n) for t, n in self._lost if self.pace.last < t + 2 * STATUS_SECONDS]
        idle = now - self.pace.last
        if self._lost and self.pace.steady and idle > ENGINE_SECONDS:
            name = self._lost[0][1]
            raise Stop("stalled", f"the engine's process {name} died and the job waits", STALLED)

    def _why_stalled(self, idle: float) -> str:
        usual = self.pace.usual_gap()
        known = f", usually every {usual:.1f} s" if usual is not None else ""
        found = look_at(self._processes, self._cpu, idle)
        ended = [name for _, name in self._lost]
        words = diagnose(found, self._figures["gpus"], self.gpus.missing, ended, self.phase())
        if self.pump.skipped:
            words += f"; it floods its log ({self.pump.skipped:,} lines were too many to be judged)"
        return f"no progress for {idle:.0f} s{known} ({self.phase()}): {words}"

    def _explain(self, state: str, why: str, status: int) -> None:
        """All that can be known about why a job is stopped, into its log."""
        say = self.pump.say
        say(f"{state.upper()}: {why}")
        if status not in (STALLED, STOPPED):
            return
        idle = time.monotonic() - self.pace.last
        say(f"last progress {idle:.0f} s ago: {json.dumps(self.progress)}")
        found = look_at(self._processes, self._cpu, idle)
        say("processes:\n" + "\n".join(map(str, found)))
        figures = [json.dumps(gpu) for gpu in self._figures.get("gpus", [])]
        if figures or self.gpus.missing:
            say("GPUs: " + ("; ".join(figures) or f"no figures, {self.gpus.missing}"))
        if state == "stalled":
            say("stacks of the Python processes:\n" + stacks(self._processes))
        say("last lines of the job:\n" + "\n".join(self.pump.last))

    def _notify(self, state: str, why: str) -> None:
        """Tell who is to be told; the job has ended, and this must not hold up the next attempt."""
        to = notify.settings()
        if to is None:
            return
        job, run = self.job, os.environ.get("AERIE_RUN", "")
        event = {
            "event": "stall",
            "run": run,
            "text": f"{run}: {job.stage} {job.log.stem} {state}: {why}",
            "stage": job.stage,
            "part": job.log.stem,
            "state": state,
            "reason": why,
            "host": platform.node(),
            "log": str(job.log),
        }
        for problem in notify.send(to, event):
            self.pump.say(f"WARNING: {problem}")

    def _judge_end(self) -> tuple[str, str, int]:
        """State, reason and exit status of a job that ended by itself."""
        code = self.ended[self.pid]
        if code == 0:
            return "done", "", 0
        self._hear_out()
        if code >= 0:
            return "failed", f"exit status {code}{self._reading()}", code
        why = f"killed by {signal.Signals(-code).name}"
        kills = _kernel_kills()
        if code == -signal.SIGKILL and kills is not None and kills != self._kills:
            why += "; the kernel killed processes here because memory ran out (OOM killer)"
        elif code == -signal.SIGKILL:
            why += "; by somebody, or by the kernel when memory ran out (`dmesg` tells)"
        return "failed", why + self._reading(), exit_status(code)

    def _reading(self) -> str:
        """The job's last line, and what the triage of its log makes of it."""
        lines = [line for line in self.pump.last if line.strip()]
        words = f": {shorten(lines[-1], 400)}" if lines else ""
        findings = self.judge.finish() if self.judge is not None else []
        if findings and findings[0].level == "fatal":
            worst = findings[0]
            words += f"\n{worst.text}\n{worst.meaning}\n{worst.advice}"
        return words

    # The status file

    def _write_status(self, state: str, why: str, status: int | None = None) -> None:
        progress = self.progress
        rate, remaining = self._rate()
        values = {
            "stage": self.job.stage,
            "state": state,
            "phase": self.phase(),
            "done": progress.get("done"),
            "total": progress.get("total"),
            "unit": progress.get("unit"),
            "rate": rate,
            "remaining_seconds": remaining,
            "loss": _json_number(progress.get("loss")),
            "accuracy": _json_number(progress.get("accuracy")),
            "last_progress": progress.get("time"),
            "stall_after_seconds": round(self.pace.limit(), 1),
            "warnings": {**self._counts(), **self.warnings},
            "alerts": list(self.alerts),
            "reason": why,
            "host": platform.node(),
            "pid": self.pid,
            "processes": len(self._processes),
            **self._figures,
            "gpus_missing": self.gpus.missing,
            "log": str(self.job.log),
            "started": round(self.started, 1),
            "updated": round(time.time(), 1),
            "ended": None if status is None else round(time.time(), 1),
            "exit": status,
            "attempt_of": _attempt_of(self.job),
        }
        text = json.dumps(values, indent=1, allow_nan=False, default=str) + "\n"
        path = self.job.status
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        # Not synced to the disk: it comes every few seconds and is worth nothing after a power cut.
        with contextlib.suppress(OSError):
            try:
                temporary.write_text(text)
                os.replace(temporary, path)
            except OSError:
                temporary.unlink()  # the disk is full

    def _rate(self) -> tuple[float | None, float | None]:
        """Units a second over the last minutes, and the seconds until the total is done."""
        if len(self._done) < 2:
            return None, None
        (start, first), (end, last) = self._done[0], self._done[-1]
        if end <= start:
            return None, None
        rate = (last - first) / (end - start)
        total = self.progress.get("total")
        return round(rate, 4), round((total - last) / rate, 1) if total and rate else None

    def _counts(self) -> dict[str, int]:
        """Messages in the log by the triage's class, without those that mean nothing; and how many
        lines were too many to be judged."""
        counts: Counter[str] = Counter()
        for finding in self.judge.so_far() if self.judge is not None else []:
            if finding.level != "benign":
                counts[finding.level] += finding.count
        if self.pump.skipped:
            counts["not judged"] = self.pump.skipped
        return dict(counts)


def _json_number(value: Any) -> Any:
    """JSON has no NaN and no infinity: those as text."""
    if isinstance(value, list):
        return [_json_number(v) for v in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _judge() -> Triage | None:
    """The triage of log lines; None when its catalogue cannot be read: the job can do without."""
    try:
        return Triage(Catalogue.load(LOG_PATTERNS))
    except InputError:
        return None


def _kernel_kills() -> int | None:
    """How many processes of this control group the kernel killed for want of memory."""
    try:
        group = Path("/proc/self/cgroup").read_text().split("::", 1)[1].strip().lstrip("/")
        for folder in (Path("/sys/fs/cgroup", group), Path("/sys/fs/cgroup")):
            events = folder / "memory.events"
            if events.is_file():
                return int(dict(map(str.split, events.read_text().splitlines()))["oom_kill"])
    except (OSError, IndexError, KeyError, ValueError):
        pass
    return None
