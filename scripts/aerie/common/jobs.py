"""The list of a run's jobs, which the workflow writes when it starts."""

from pathlib import Path

from aerie.common.records import Record
from aerie.common.stages import STAGES


class Job(Record):
    """One job of a run. Paths are relative to the run's folder."""

    stage: str
    """The rule."""
    part: str
    """Value of the rule's wildcard: a lane, a vocabulary size or a drafter; `run` without one."""
    outputs: list[str]
    """Files and folders that it writes."""
    needs: list[str]
    """Names of the jobs whose outputs it reads."""
    log: str
    """Its log file."""

    @property
    def name(self) -> str:
        return job_name(self.stage, self.part)


class JobList(Record):
    """`results/<run>/jobs.json`: all jobs that the last start of the run asked for, whether they
    had to run or not; each after those it needs."""

    jobs: list[Job]

    @classmethod
    def sort(cls, jobs: list[Job]) -> "JobList":
        """The jobs in the order of the data; parts that are numbers in their order."""

        def key(job: Job) -> tuple[int, int, str]:
            stage = STAGES.index(job.stage) if job.stage in STAGES else len(STAGES)
            return stage, int(job.part) if job.part.isdecimal() else -1, job.part

        return cls(jobs=sorted(jobs, key=key))


def job_name(stage: str, part: str) -> str:
    """How messages and `Job.needs` name a job."""
    return stage if part == "run" else f"{stage} {part}"


def job_list_path(run: Path) -> Path:
    """Where the list of the run in this folder is."""
    return run / "jobs.json"
