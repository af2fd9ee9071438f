"""A long job under supervision: its output goes into a log, its state into a file, and it is
stopped when it stalls.

Three processes. The front stays with its caller and forwards signals; behind it, in sessions of
their own, are the supervisor and the job. Whichever is killed, another ends the rest:

    front       sees the end of the supervisor, or of Snakemake, and ends the rest
    supervisor  gets a signal from the kernel when the front dies, and ends the job
    job         is killed by the kernel when the supervisor dies

Front and supervisor adopt orphans (PR_SET_CHILD_SUBREAPER), so the job's processes are always their
descendants, even those that changed their process group.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import psutil

from aerie.common import devices
from aerie.common.errors import EXIT_CRASH, EXIT_PERMANENT, PERMANENT, InputError
from aerie.common.processes import ProcessId, next_signal
from aerie.config import Watch
from aerie.watching.job_status import JobStatus
from aerie.watching.process_tree import (
    GONE,
    SIGNALS,
    adopt_orphans,
    die_with,
    end_processes,
    exit_status,
    reap,
)
from aerie.watching.supervisor import TICK_SECONDS, SupervisedJob, Supervisor

SNAKEMAKE = "AERIE_SNAKEMAKE"
"""Environment variable with the id of the Snakemake process whose end ends the job."""


def supervise(job: SupervisedJob, watch: Watch, gpus: int = 0) -> int:
    """Run the job to its end; returns its exit status, 128 + the signal that killed it, or ours.

    Waits first until `gpus` GPUs are free, and shows the job only these. Call it from the main
    thread of a process that does nothing else.
    """
    snakemake = _snakemake()
    if gpus:
        _take_gpus(job.stage, gpus, job.log, snakemake)
    if why := _permanent_failure(job):
        words = f"not tried again in this run, it would fail for the same reason: {why}"
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.write_text(f"supervisor: {words}\n")
        print(f"{job.stage} {words}\nlog: {job.log.with_suffix('.failed.log')}", file=sys.stderr)
        return EXIT_PERMANENT
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    front = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = os.fork()
    if supervisor == 0:
        status = EXIT_CRASH
        try:
            os.setsid()
            die_with(front, GONE)
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
        if snakemake is not None and not snakemake.is_alive():
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


def _permanent_failure(job: SupervisedJob) -> str | None:
    """Why an earlier attempt at this job in this run of Snakemake failed, if another would too."""
    with contextlib.suppress(InputError):
        before = JobStatus.read(job.status)
        attempt = job.attempt_of()
        if before.exit in PERMANENT and attempt is not None and before.attempt_of == attempt:
            return before.reason
    return None


def _snakemake() -> ProcessId | None:
    """The Snakemake that started this process, if it is named and still there."""
    number = os.environ.get(SNAKEMAKE, "")
    parents = (p.pid for p in psutil.Process().parents() if str(p.pid) == number)
    return next((ProcessId.of(pid) for pid in parents), None)


def _take_gpus(stage: str, wanted: int, log: Path, snakemake: ProcessId | None) -> None:
    """Wait until enough GPUs are free, and name them in CUDA_VISIBLE_DEVICES.

    They stay ours as long as this process, or the supervisor that it forks, lives.
    """
    said = False
    while True:
        try:
            found = devices.take_devices(wanted)
        except InputError as error:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"error: {error}\n")
            raise
        if found is not None:
            os.environ[devices.VISIBLE] = ",".join(found[0])
            return
        if not said:
            said = True
            print(f"{stage}: waits for {wanted} free GPU(s)", file=sys.stderr)
        if snakemake is not None and not snakemake.is_alive():
            sys.exit(128 + signal.SIGTERM)
        time.sleep(1)
