"""The supervisor's process: starts the job, follows it, writes its status, stops it when it
stalls. `front.py` describes how it works together with the other processes."""

import contextlib
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from aerie.common.errors import EXIT_PERMANENT, EXIT_STALLED
from aerie.common.files import digest
from aerie.common.processes import next_signal
from aerie.common.progress import ProgressLine
from aerie.config import Watch
from aerie.watching import notify
from aerie.watching.diagnosis import diagnose, stacks
from aerie.watching.job_status import JobStatus
from aerie.watching.log_judge import LogJudge
from aerie.watching.pace import LossWatch, Pace
from aerie.watching.process_tree import (
    GONE,
    SIGNALS,
    adopt_orphans,
    descendants,
    die_with,
    end_processes,
    exit_status,
    reap,
)
from aerie.watching.progress_reader import ProgressReader
from aerie.watching.pump import Pump
from aerie.watching.telemetry import Telemetry, kernel_kills

SESSION = "AERIE_SESSION"
"""Environment variable with a name for the run of Snakemake, the same on all machines."""

STATUS_SECONDS = 3.0  # between two looks at the job's processes
TICK_SECONDS = 1.0
ENGINE_SECONDS = 20.0  # from the end of an engine's process until its job is stopped
ALERTS = 20
COMPILING = re.compile(r"torch\.compile|Capturing CUDA graph|Dynamo bytecode")


@dataclass
class SupervisedJob:
    """A command, and where its output, progress and status go.

    `disks`: folders it writes to, whose free space is watched.
    """

    command: list[str]
    stage: str
    log: Path
    progress: Path
    status: Path
    disks: list[Path] = field(default_factory=list)

    def attempt_of(self) -> str | None:
        """The same for all attempts at this job in one run of Snakemake; None without Snakemake."""
        session = os.environ.get(SESSION)
        return digest(self.command, session) if session else None


class Stop(Exception):
    """The job must be stopped: `state` for the status file, why, and our exit status."""

    def __init__(self, state: str, why: str, status: int):
        super().__init__(why)
        self.state, self.why, self.status = state, why, status


class Supervisor:
    """One job from its start to its end."""

    def __init__(self, job: SupervisedJob, watch: Watch):
        self.job, self.watch = job, watch
        limits = watch.stages.get(job.stage)  # type: ignore[call-overload]
        stall, load = watch.stall_seconds, watch.load_seconds
        if limits is not None:
            stall, load = limits.stall_seconds or stall, limits.load_seconds or load
        self.pace = Pace(stall, load, time.monotonic())
        self.losses = LossWatch()
        self.progress = ProgressReader(job.progress)
        self.telemetry = Telemetry([job.log.parent, *job.disks], watch.min_free_gib)
        self.alerts: deque[str] = deque(maxlen=ALERTS)
        self.warnings: Counter[str] = Counter()
        self.compiling = False
        self.ended: dict[int, int] = {}
        self._kills = kernel_kills()

    def run(self) -> int:
        """Run the job to its end; our exit status."""
        job = self.job
        adopt_orphans()
        for path in (job.log, job.progress, job.status):
            path.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        self.started = time.time()
        try:
            process = self._start(writing)
        except OSError as error:
            job.log.write_text(f"{job.command[0]} cannot be run: {error}\n")
            print(f"{job.stage}: {job.command[0]} cannot be run: {error}", file=sys.stderr)
            return 127
        os.close(writing)
        self.pid = process.pid
        self.pump = Pump(reading, job.log)
        self.judge = LogJudge(self.pump)
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
        self._finish_reading()
        if self.pump.full and state == "failed":
            self.pump.say("last lines of the job:\n" + "\n".join(self.pump.last))
        seconds = time.time() - self.started
        self.pump.say(f"{state} after {seconds:.0f} s, status {status}" + (f": {why}" * bool(why)))
        self._write_status(state, why, status)
        if status in (EXIT_STALLED, EXIT_PERMANENT):
            self._notify(state, why)
        if state != "done":
            # Snakemake removes the log before it tries again.
            with contextlib.suppress(OSError):
                shutil.copyfile(job.log, job.log.with_suffix(".failed.log"))
            print(f"{job.stage} {state}: {why}\nlog: {job.log}", file=sys.stderr)
        return status

    def _start(self, output: int) -> "subprocess.Popen[bytes]":
        me = os.getpid()

        def in_child() -> None:
            die_with(me, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        return subprocess.Popen(
            self.job.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=in_child,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def _follow(self) -> None:
        """Return when the job has ended; raise `Stop` when it must be stopped."""
        tick = time.monotonic()
        self.telemetry.begin()
        while True:
            received = next_signal(SIGNALS, TICK_SECONDS)
            now = time.monotonic()
            if now - tick > 10 * TICK_SECONDS:
                self.pace.skip(now - tick)  # it was the supervisor that did not run
            tick = now
            self.ended.update(reap())
            if self.pid in self.ended:
                self._read_progress(now)
                return
            if received not in (None, signal.SIGCHLD):
                if received == GONE:
                    why = "what started it is gone or ending"
                    raise Stop("stopped", why, 128 + signal.SIGTERM)
                name = signal.Signals(received).name
                raise Stop("stopped", f"{name} received", 128 + received)
            self._read_progress(now)
            if now - self.telemetry.looked >= STATUS_SECONDS:
                self._look_and_write(now)
            self._check_engines(now)
            idle = now - self.pace.last
            if idle > self.pace.limit():
                if self.telemetry.looked < now:
                    self._look_and_write(now)
                raise Stop("stalled", self._why_stalled(idle), EXIT_STALLED)

    def _wait_for_children(self, seconds: float) -> None:
        """Helpers of Python (a resource tracker) end by themselves after their job."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and descendants():
            self.ended.update(reap())
            time.sleep(0.05)

    # Progress

    def _read_progress(self, now: float) -> None:
        for line in self.progress.read(now):
            if line.phase in ("loading", "compiling"):
                self.pace.forget()
            else:
                self.compiling = False
            # What comes after the last unit has no pace of its own.
            at_work = line.phase == "working" and not (line.total and line.done == line.total)
            self.pace.event(at_work, now)
            self.telemetry.mark_progress()
            if line.loss is not None:
                self._take_loss(line.loss)

    def _take_loss(self, loss: float) -> None:
        if not math.isfinite(loss) or loss == 0:
            raise Stop("stopped", f"the loss is {loss:g}", EXIT_PERMANENT)
        found = self.losses.take(loss)
        if found is not None:
            kind, words = found
            self._alert(f"loss {kind}", words)
            if kind == "divergence" and self.watch.stop_on_divergence:
                raise Stop("stopped", words, EXIT_PERMANENT)

    def _alert(self, kind: str, words: str) -> None:
        self.warnings[kind] += 1
        self.alerts.append(words)
        self.pump.say(f"WARNING: {words}")

    def phase(self) -> str:
        """What the job does by its own account; `loading` until it writes a line."""
        if self.compiling:
            return "compiling"
        return self.progress.latest.phase if self.progress.latest else "loading"

    # Looking at the job

    def _look_and_write(self, now: float) -> None:
        try:
            self._read_log()
            self.telemetry.look(now)
            self._write_status("running", "")
        except Exception as error:
            # A job of days must not end because a driver fails while it is looked at.
            words = f"the supervisor could not look at the job: {error!r}"
            if words not in self.alerts:
                self._alert("not seen", words)
        if self.telemetry.full_disk:
            raise Stop("stopped", self.telemetry.full_disk, EXIT_PERMANENT)

    def _read_log(self) -> None:
        lines = self.judge.read()
        if self.phase() == "loading" and any(map(COMPILING.search, lines)):
            self.compiling = True

    def _finish_reading(self) -> None:
        """Read the job's output to its end; only processes that it left behind keep it open."""
        self.pump.join(2 if descendants() else 20)
        self._read_log()

    def _check_engines(self, now: float) -> None:
        """Stop a job whose engine died and that did not notice."""
        # A job that made progress since then no longer needs it; its last lines may come later.
        recent = [x for x in self.telemetry.lost if self.pace.last < x[0] + 2 * STATUS_SECONDS]
        self.telemetry.lost = recent
        if recent and self.pace.steady and now - self.pace.last > ENGINE_SECONDS:
            why = f"the engine's process {recent[0][1]} died and the job waits"
            raise Stop("stalled", why, EXIT_STALLED)

    # Explaining

    def _why_stalled(self, idle: float) -> str:
        usual = self.pace.usual_gap()
        known = f", usually every {usual:.1f} s" if usual is not None else ""
        seen = self.telemetry
        ended = [name for _, name in seen.lost]
        words = diagnose(
            seen.look_at_processes(idle), seen.gpu_figures, seen.gpus.missing, ended, self.phase()
        )
        if self.pump.skipped:
            words += f"; it floods its log ({self.pump.skipped:,} lines were too many to judge)"
        return f"no progress for {idle:.0f} s{known} ({self.phase()}): {words}"

    def _explain(self, state: str, why: str, status: int) -> None:
        """Write into the log what is known about why the job is stopped."""
        say, seen = self.pump.say, self.telemetry
        say(f"{state.upper()}: {why}")
        if status not in (EXIT_STALLED, EXIT_PERMANENT):
            return
        idle = time.monotonic() - self.pace.last
        latest = self.progress.latest or ProgressLine()
        say(f"last progress {idle:.0f} s ago: {json.dumps(latest.model_dump(exclude_unset=True))}")
        say("processes:\n" + "\n".join(map(str, seen.look_at_processes(idle))))
        figures = [json.dumps(gpu.as_json()) for gpu in seen.gpu_figures]
        if figures or seen.gpus.missing:
            say("GPUs: " + ("; ".join(figures) or f"no figures, {seen.gpus.missing}"))
        if state == "stalled":
            say("stacks of the Python processes:\n" + stacks(seen.processes))
        say("last lines of the job:\n" + "\n".join(self.pump.last))

    def _notify(self, state: str, why: str) -> None:
        """Report the event. The job has ended; this must not delay the next attempt for long."""
        to = notify.settings()
        if to is None:
            return
        job, run = self.job, os.environ.get("AERIE_RUN", "")
        event = notify.Event(
            event="stall",
            run=run,
            text=f"{run}: {job.stage} {job.log.stem} {state}: {why}",
            stage=job.stage,
            part=job.log.stem,
            state=state,
            reason=why,
            host=platform.node(),
            log=str(job.log),
        )
        for problem in notify.send(to, event):
            self.pump.say(f"WARNING: {problem}")

    def _judge_end(self) -> tuple[str, str, int]:
        """State, reason and exit status of a job that ended by itself."""
        code = self.ended[self.pid]
        if code == 0:
            return "done", "", 0
        self._finish_reading()
        if code >= 0:
            return "failed", f"exit status {code}{self.judge.last_words()}", code
        why = f"killed by {signal.Signals(-code).name}"
        kills = kernel_kills()
        if code == -signal.SIGKILL and kills is not None and kills != self._kills:
            why += "; the kernel killed processes here because memory ran out (OOM killer)"
        elif code == -signal.SIGKILL:
            why += "; by a user, or by the kernel when memory ran out (see `dmesg`)"
        return "failed", why + self.judge.last_words(), exit_status(code)

    # The status file

    def _write_status(self, state: str, why: str, status: int | None = None) -> None:
        latest = self.progress.latest or ProgressLine()
        rate, remaining = self.progress.rate()
        seen = self.telemetry
        values: dict[str, object] = {
            "stage": self.job.stage,
            "state": state,
            "phase": self.phase(),
            "done": latest.done,
            "total": latest.total,
            "unit": latest.unit,
            "rate": rate,
            "remaining_seconds": remaining,
            "loss": _finite_or_text(latest.loss),
            "accuracy": latest.accuracy and [_finite_or_text(a) for a in latest.accuracy],
            "last_progress": latest.time,
            "stall_after_seconds": round(self.pace.limit(), 1),
            "warnings": {**self.judge.counts(), **self.warnings},
            "alerts": list(self.alerts),
            "reason": why,
            "host": platform.node(),
            "pid": self.pid,
            "processes": len(seen.processes),
            "memory_gib": seen.memory_gib,
            "cores_busy": seen.cores_busy,
            "disk_free_gib": seen.disk_free_gib,
            "gpus": seen.gpu_figures,
            "gpus_missing": seen.gpus.missing,
            "log": str(self.job.log),
            "started": round(self.started, 1),
            "updated": round(time.time(), 1),
            "ended": None if status is None else round(time.time(), 1),
            "exit": status,
            "attempt_of": self.job.attempt_of(),
        }
        found = JobStatus.model_validate(values)
        text = json.dumps(found.as_json(), indent=1, allow_nan=False) + "\n"
        path = self.job.status
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        # Not synced: it is replaced every few seconds and worthless after a power cut.
        with contextlib.suppress(OSError):
            try:
                temporary.write_text(text)
                os.replace(temporary, path)
            except OSError:
                temporary.unlink()  # the disk is full


def _finite_or_text(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: those as text."""
    return value if value is None or math.isfinite(value) else str(value)
