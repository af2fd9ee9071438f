"""The status of a run: its jobs with their states, as `make status` shows them."""

from collections import Counter
from pathlib import Path
from typing import Any

from aerie.common.jobs import Job, job_name
from aerie.common.progress import Number
from aerie.common.records import Record
from aerie.watching.job_status import JobFigures

STATES = (
    "not started",
    "waiting",
    "running",
    "done",
    "failed",
    "stalled",
    "stopped",
    "dead",
    "no sign",
    "out of reach",
)
"""`not started`: something it needs is missing; `waiting`: everything it needs is there. `failed`:
by itself; `stalled`, `stopped`: by its supervisor. `dead`: its process on this machine is gone and
left no exit status. `no sign`: a job without a sign of life for a minute (without a supervisor: an
hour). `out of reach`: something it needs has failed."""
BROKEN = ("failed", "stalled", "stopped", "dead")
AT_WORK = ("running", "no sign")


class JobView(JobFigures):
    """A job of a run with its state; JSON of `scripts/show_status.py --json`."""

    stage: str
    """The rule."""
    part: str
    """Value of the rule's wildcard; `run` without one."""
    outputs: list[str] = []
    """Files that it writes, within the run's folder."""
    needs: list[str] = []
    """Names of the jobs whose outputs it reads."""
    state: str = "not started"
    """See the table of states."""
    earlier: bool = False
    """Its result is there, but something that it is made from is being made again."""
    note: str = ""
    """What is unusual."""
    result: str = ""
    """What came out, in words."""
    figures: dict[str, float] = {}
    """What came out, as numbers."""
    losses: list[float] = []
    """Last losses of a training, oldest first."""
    accuracies: list[float] = []
    """Last accuracies of a training, summed over the TTT steps, oldest first."""
    seconds: Number | None = None
    """How long it took, or has been running."""
    log: str = ""
    """The log to read."""

    @property
    def name(self) -> str:
        return job_name(self.stage, self.part)

    @property
    def share(self) -> float | None:
        """How much of it is done, 0 to 1; None when unknown."""
        if self.state == "done":
            return 1.0
        if self.done is None or not self.total:
            return None
        return min(max(self.done / self.total, 0.0), 1.0)

    @classmethod
    def of(cls, job: Job, folder: Path) -> "JobView":
        values = job.as_json() | {"log": str(folder / job.log)}
        return cls.model_validate(values)


class Disk(Record):
    """A disk that a run writes to."""

    path: str
    """A folder on it."""
    free_gib: float
    """Free space, GiB."""
    total_gib: float
    """Size, GiB."""


class RunStatus(Record):
    """A run at one time; JSON of `scripts/show_status.py --json`, which adds `stages` (`stage`,
    `state`) and `warnings` (messages of all logs by class)."""

    run: str
    """Its name."""
    folder: str
    """Its folder."""
    time: float
    """When it was looked at, Unix seconds."""
    state: str = "not started"
    """The state that needs attention first, of those of its jobs."""
    began: float | None = None
    """When Snakemake last started jobs of it, Unix seconds; null when unknown."""
    note: str = ""
    """Why its jobs are unknown."""
    jobs: list[JobView] = []
    """Its jobs, each after those it needs."""
    disks: list[Disk] = []
    """Disks of its folder and the store."""
    unreadable: list[str] = []
    """Files that could not be read, with the reason."""

    def stages(self) -> list[tuple[str, list[JobView]]]:
        """The stages in the order of the data, each with its jobs."""
        found: dict[str, list[JobView]] = {}
        for job in self.jobs:
            found.setdefault(job.stage, []).append(job)
        return list(found.items())

    def warnings(self) -> dict[str, int]:
        """Messages of all logs by class."""
        counts: Counter[str] = Counter()
        for job in self.jobs:
            counts.update(job.warnings)
        return dict(counts)

    def as_json(self) -> dict[str, Any]:
        stages = [{"stage": s, "state": state_of(jobs)} for s, jobs in self.stages()]
        return {**super().as_json(), "stages": stages, "warnings": self.warnings()}


def state_of(jobs: list[JobView]) -> str:
    """One state for several jobs: the one that needs attention first."""
    states = {j.state for j in jobs}
    for state in ("running", *BROKEN, "no sign", "out of reach"):
        if state in states:
            return state
    if states == {"done"}:
        return "done"
    return "waiting" if "waiting" in states else "not started"
