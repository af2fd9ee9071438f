"""What the supervisor writes of a job: `logs/<rule>/<part>.status.json`."""

from typing import Literal

from aerie.common.progress import Number
from aerie.common.records import Record


class GpuFigures(Record):
    """One GPU of a job; null for what NVML does not report."""

    index: int | None = None
    """NVML's number."""
    name: str | None = None
    """Model."""
    use_percent: Number | None = None
    """Share of the time in which a kernel ran, %."""
    memory_gib: Number | None = None
    """Memory used, GiB."""
    memory_total_gib: Number | None = None
    """Memory, GiB."""
    power_w: Number | None = None
    """Power drawn, W."""
    power_limit_w: Number | None = None
    """Power limit, W."""


class JobFigures(Record):
    """What is known of a job while and after it runs. Times are Unix seconds."""

    phase: str = ""
    """As in the progress; `loading` until the job writes its first line."""
    done: Number | None = None
    """Units done."""
    total: Number | None = None
    """Units to do."""
    unit: str | None = None
    """What is counted, such as `steps`."""
    rate: Number | None = None
    """Units a second over the last minutes; null when unknown."""
    remaining_seconds: Number | None = None
    """Time until `total` at this rate; null when unknown."""
    last_progress: Number | None = None
    """When the job last wrote progress."""
    stall_after_seconds: Number | None = None
    """How long it may now go without progress."""
    warnings: dict[str, int] = {}
    """Messages of the log by class; `loss spike` and `loss divergence`; `not seen`: reasons why the
    supervisor could not look at the job; `not judged`: lines of a flood that were skipped (of those
    in three seconds the last 2,000 are judged)."""
    alerts: list[str] = []
    """The supervisor's last 20 own warnings."""
    reason: str = ""
    """Why it failed or was stopped, in words; empty otherwise."""
    host: str = ""
    """Where it runs."""
    pid: int | None = None
    """The job's process."""
    memory_gib: Number | None = None
    """Resident memory of all its processes, GiB (shared pages count in each)."""
    cores_busy: Number | None = None
    """Cores busy since the last look."""
    disk_free_gib: Number | None = None
    """Least free space of the disks of its log and the store, GiB."""
    gpus: list[GpuFigures] = []
    """Its GPUs."""
    gpus_missing: str | None = None
    """Why there are no GPU figures; null when there are, or when there is no GPU."""
    started: Number | None = None
    """When it was started."""
    updated: Number | None = None
    """The heartbeat: older than a minute while `running` means that the supervisor is gone."""
    ended: Number | None = None
    """When it ended; null while it runs."""
    exit: int | None = None
    """Exit status, null while it runs: 75 stalled; 76 stopped for its loss or a full disk, 77 for
    its states, which another attempt does not fix; 128 + a signal."""


class JobStatus(JobFigures):
    """State of a supervised job, replaced as a whole every few seconds."""

    stage: str = ""
    """The rule."""
    state: Literal["running", "ending", "done", "failed", "stalled", "stopped"]
    """`running`, `ending`; then `done`, `failed` (by itself), `stalled` or `stopped`."""
    loss: float | str | None = None
    """Last loss of a training; NaN and infinity as text."""
    accuracy: list[float | str] | None = None
    """Last accuracies of a training, one a TTT step."""
    processes: int = 0
    """How many processes it has."""
    log: str = ""
    """Its log file."""
    attempt_of: str | None = None
    """The same for all attempts at a job in one run of Snakemake; null without Snakemake."""
