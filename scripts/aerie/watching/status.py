"""The status of a run, read from the files in its folder and nothing else.

It works on any machine that sees the folder, while the jobs run on others. Files may be incomplete,
damaged or written by another version: what cannot be read is named in `RunStatus.unreadable`, and
the rest is shown.
"""

import platform
import shutil
import time
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from aerie.common.errors import InputError
from aerie.common.files import read_optional
from aerie.common.jobs import JobList, job_list_path
from aerie.common.paths import LOG_PATTERNS
from aerie.common.processes import ProcessId
from aerie.common.progress import ProgressLine
from aerie.common.records import Record
from aerie.common.stages import OUTPUTS, read_benchmark
from aerie.common.text import clock, printable_lines
from aerie.watching.catalogue import Catalogue
from aerie.watching.job_status import JobFigures, JobStatus
from aerie.watching.results import read_result
from aerie.watching.run_files import modified, read_tail
from aerie.watching.run_status import AT_WORK, BROKEN, Disk, JobView, RunStatus, state_of
from aerie.watching.snakemake_log import failed_logs
from aerie.watching.triage import Triage

SILENT_SECONDS = 60.0  # without a word from a supervisor, which writes every few seconds
AHEAD_SECONDS = 5.0  # a time this far in the future comes from a wrong clock
GONE_SECONDS = 10.0  # from the end of a job's process until its supervisor has reported it
QUIET_SECONDS = 300.0  # without a new line in a log, until that is mentioned; many jobs log little
LOST_SECONDS = 3600.0  # without a new line in a log, until its job counts as lost
START_SECONDS = 60.0  # a process that starts later than its job did by this is another one
TAIL = 1 << 18  # bytes read at the end of a progress file: about twenty minutes
LOG_TAIL = 1 << 20  # bytes of a log that are triaged

Kind = TypeVar("Kind", bound=Record)


def gather(folder: Path) -> RunStatus:
    """The status of the run in this folder; its jobs come from `jobs.json`."""
    status = RunStatus(run=folder.absolute().name, folder=str(folder), time=time.time())
    configured = folder / "config.json"
    status.began = modified(configured)
    reader = _Reader(status)
    listed = reader.record(JobList, job_list_path(folder))
    if listed is None:
        status.note = _why_unknown(folder)
    else:
        status.jobs = [JobView.of(job, folder) for job in listed.jobs]
    failed = failed_logs(folder, status.began)
    for job in status.jobs:
        reader.look(job, failed)
    _settle(status.jobs)
    for job in status.jobs:
        if job.state == "done":
            reader.result(job)
    status.state = state_of(status.jobs)
    store = printable_lines(str(read_optional(configured).get("store") or "results/store"))
    status.disks = _disks(folder, folder.absolute().parent.parent / store)
    return status


def _why_unknown(folder: Path) -> str:
    """Why the jobs of a run are unknown, and what to do."""
    if any((folder / name).exists() for name in ("config.json", "jobs.json", "logs")):
        return (
            f"{job_list_path(folder)}, the list of jobs, is missing or cannot be read: an earlier "
            "version of Aerie started this run. Run `make run` once more; it writes the list of "
            "jobs"
        )
    return "no job of this run has been started; `make run` starts them"


class _Reader:
    """Reads a run's files, and adds to its status which ones could not be read."""

    def __init__(self, status: RunStatus):
        self.status = status
        self.folder = Path(status.folder)

    def record(self, kind: type[Kind], path: Path) -> Kind | None:
        """The record in a file; None when it is absent or cannot be read, which is noted."""
        if modified(path) is None:
            return None
        try:
            return kind.read(path)
        except InputError as error:
            if modified(path) is not None:  # it was not removed meanwhile
                self.unreadable(str(error))
            return None

    def unreadable(self, why: str) -> None:
        self.status.unreadable.append(printable_lines(why))

    def look(self, job: JobView, failed: set[str]) -> None:
        """Find a job's state from its own files; `not started` when they say nothing."""
        log = Path(job.log)
        made = [modified(self.folder / name) for name in job.outputs]
        finished = max(t for t in made if t is not None) if all(made) else None
        path = log.with_suffix(".status.json")
        progress = log.with_suffix(".progress.jsonl")
        found = self.record(JobStatus, path)
        if found is not None:
            self._take_status(job, found, modified(path) or 0, finished)
        elif finished is not None:
            job.state, job.ended = "done", finished
        else:
            self._take_log(job, log, progress, failed)
        if job.state == "done" and job.seconds is None:
            job.seconds = _benchmark(self.folder, job)
        if job.state in (*AT_WORK, *BROKEN):
            self._take_lines(job, self.lines(progress))
        self._look_at_attempts(job, log)

    def _take_status(
        self, job: JobView, found: JobStatus, written: float, finished: float | None
    ) -> None:
        """Take over what the supervisor wrote. `written`: when it did by the file's time;
        `finished`: when the job's outputs were written."""
        for key in JobFigures.model_fields:
            setattr(job, key, getattr(found, key))
        for key in ("phase", "unit", "host", "reason", "gpus_missing"):
            value = getattr(found, key)
            setattr(job, key, value and printable_lines(value))
        job.alerts = list(map(printable_lines, found.alerts))
        job.warnings = {printable_lines(k): n for k, n in found.warnings.items()}
        # Clocks of other machines may be wrong; the file's time is the file server's. A time in the
        # future is ignored: a dead job would seem alive until our clock reaches it.
        told = found.updated or 0
        past = [t for t in (told, written) if t <= self.status.time + AHEAD_SECONDS]
        job.updated = max(past) if past else min(told, written)
        runs = found.state in ("running", "ending")
        if job.started and job.ended:
            job.seconds = job.ended - job.started
        elif job.started and runs:
            job.seconds = max((told or job.updated) - job.started, 0)
        if runs:
            self._judge_signs(job)
        elif found.state == "done":
            if finished is None:
                job.note = "it was done, but its outputs are gone"
            else:
                job.state = "done"
        else:
            job.state = found.state
            if finished is not None and finished > (job.ended or 0):
                job.state, job.reason = "done", ""
        began = self.status.began
        if began and job.state in (*BROKEN, "no sign") and job.updated < began:
            job.note, job.reason = f"{job.state} in an earlier run", ""
            job.state = "not started"

    def _judge_signs(self, job: JobView) -> None:
        """Whether a job that should be running still is."""
        job.state = "running"
        age = self.status.time - (job.updated or 0)
        if job.host != platform.node():
            if age > SILENT_SECONDS:
                job.state = "no sign"
                job.note = f"no sign from {job.host or 'its host'} since {clock(job.updated)}"
        elif age > GONE_SECONDS and not _is_alive(job):
            job.state = "dead"
            job.note = f"process {job.pid} is gone, its last sign was at {clock(job.updated)}"
        elif age > SILENT_SECONDS:
            job.state = "no sign"
            job.note = (
                f"its process {job.pid} is alive, but its supervisor has given no sign since "
                f"{clock(job.updated)}"
            )

    def _take_log(self, job: JobView, log: Path, progress: Path, failed: set[str]) -> None:
        """A job without supervisor and results has only its log, which starts with it."""
        written = modified(log)
        measured = modified(_benchmark_path(self.folder, job))
        if written is None:
            return
        if measured is not None and measured >= written:
            job.note = "it was done, but its outputs are gone"
            return
        if self.status.began and written < self.status.began - 1:
            return
        job.updated = max(written, modified(progress) or 0)
        tail = read_tail(log, LOG_TAIL)
        last = tail.rstrip().rsplit("\n", 1)[-1]
        if last.startswith("error: ") or f"{log.parent.name}/{log.name}" in failed:
            job.state, job.ended = "failed", written
            job.reason = "\n".join(x for x in (last, _explanation(tail)) if x)
            return
        job.state = "running"
        age = self.status.time - job.updated
        if age > LOST_SECONDS:
            job.state = "no sign"
        if age > QUIET_SECONDS:
            job.note = f"nothing new in its log since {clock(job.updated)}"

    def lines(self, path: Path) -> list[ProgressLine]:
        """The last lines of progress, of the last attempt only."""
        found: list[ProgressLine] = []
        bad = 0
        for raw in read_tail(path, TAIL).split("\n")[:-1]:
            try:
                line = ProgressLine.model_validate_json(raw)
            except ValidationError:
                bad += 1
                continue
            if line.time is None:
                bad += 1
                continue
            before = found[-1].done if found else None
            if before is not None and line.done is not None and line.done < before:
                found = []
            found.append(line)
        if bad:
            self.unreadable(f"{path}: {bad} of its last lines")
        return found

    def _take_lines(self, job: JobView, lines: list[ProgressLine]) -> None:
        """Last losses; and, for a job without supervisor, how far it is."""
        lines = [x for x in lines if not job.started or (x.time or 0) > job.started - 1]
        job.losses = [x.loss for x in lines if x.loss is not None and _is_finite(x.loss)]
        sums = [sum(x.accuracy) for x in lines if x.accuracy is not None]
        job.accuracies = list(filter(_is_finite, sums))
        if not lines or job.host or job.state not in AT_WORK:
            return
        last = lines[-1]
        job.started = job.started or lines[0].time
        job.last_progress = last.time
        job.phase, job.unit = printable_lines(last.phase), last.unit and printable_lines(last.unit)
        job.done, job.total, job.rate = last.done, last.total, last.rate
        if job.total and job.rate and job.done is not None:
            job.remaining_seconds = max(job.total - job.done, 0) / job.rate

    def _look_at_attempts(self, job: JobView, log: Path) -> None:
        """The log of a failed attempt, where there is one."""
        kept = log.with_suffix(".failed.log")
        written = modified(kept)
        if written is None or job.state == "not started":
            return
        if job.state in BROKEN:
            job.log = job.log if modified(log) is not None else str(kept)
        elif written > (self.status.began or 0) and job.started and written <= job.started + 1:
            job.note = job.note or f"an attempt before this one failed: {kept}"

    def result(self, job: JobView) -> None:
        """What came out of a finished job."""
        try:
            found = read_result(self.folder, job.stage, job.part)
        except InputError as error:
            self.unreadable(str(error))
        except (OSError, LookupError, ValueError) as error:
            path = self.folder / OUTPUTS[job.stage].format(part=job.part)
            self.unreadable(f"{path}: not in Aerie's format ({error!r})")
        else:
            job.result, job.figures = found or ("", {})


def _settle(jobs: list[JobView]) -> None:
    """Derive the states of jobs that have not started from those of the jobs they need."""
    states: dict[str, str] = {}
    for job in jobs:
        missing = [n for n in job.needs if states.get(n, "done") != "done"]
        if job.state == "done":
            job.earlier = bool(missing)
        elif job.state == "not started":
            broken = [n for n in missing if states[n] in (*BROKEN, "out of reach")]
            if broken:
                job.state = "out of reach"
                job.note = job.note or f"needs {broken[0]}"
            elif not missing:
                job.state = "waiting"
        # What comes after an old result cannot start from it.
        states[job.name] = "not started" if job.earlier else job.state


def _is_alive(job: JobView) -> bool:
    """Whether a job's process on this machine is alive; another may have its number by now."""
    process = ProcessId.of(job.pid) if job.pid is not None else None
    return process is not None and (
        job.started is None or process.start_time < job.started + START_SECONDS
    )


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def _benchmark_path(folder: Path, job: JobView) -> Path:
    return folder / "benchmarks" / job.stage / f"{job.part}.tsv"


def _benchmark(folder: Path, job: JobView) -> float | None:
    """How long a job took by Snakemake's measurement, seconds."""
    try:
        seconds = float(read_benchmark(_benchmark_path(folder, job)).get("s") or "nan")
    except ValueError:
        return None
    return seconds if _is_finite(seconds) else None


def _explanation(log: str) -> str:
    """What the triage says of a failed job's log: meaning and advice."""
    try:
        judge = Triage(Catalogue.load(LOG_PATTERNS))
    except InputError:
        return ""
    judge.feed(log)
    worst = next(iter(judge.finish()), None)
    if worst is None or worst.level != "fatal":
        return ""
    return printable_lines(f"{worst.meaning}\n{worst.advice}")


def _disks(folder: Path, store: Path) -> list[Disk]:
    """The disks of the run and the store, each once."""
    found: dict[int, Disk] = {}
    here = next(
        (p for p in (folder, *folder.absolute().parents) if modified(p) is not None), folder
    )
    for path in (here, store):
        try:
            usage = shutil.disk_usage(path)
            device = path.stat().st_dev
        except (OSError, ValueError):
            continue
        free, total = (round(n / 2**30, 2) for n in (usage.free, usage.total))
        found.setdefault(device, Disk(path=str(path), free_gib=free, total_gib=total))
    return list(found.values())
