"""A run's status in Prometheus's text format, for node-exporter's textfile collector."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from aerie.watching.run_status import AT_WORK, STATES, JobView, RunStatus

GIB = 2**30
Sample = tuple[dict[str, object], float | None]
"""Labels of a figure beside `run`, and its value; None when it is unknown."""


def as_prometheus(status: RunStatus) -> str:
    """All known figures as gauges with a label `run`."""
    registry = CollectorRegistry()
    registry.register(_Figures(status))
    return generate_latest(registry).decode()


class _Figures(Collector):
    def __init__(self, status: RunStatus):
        self.status = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, about, samples in _families(self.status):
            found: dict[tuple[str, ...], float] = {}  # a series must not appear twice
            names = ["run"]
            for labels, value in samples:
                if value is not None:
                    names = ["run", *labels]
                    found[(self.status.run, *map(str, labels.values()))] = value
            if found:
                family = GaugeMetricFamily(f"aerie_{name}", about, labels=names)
                for values, number in found.items():
                    family.add_metric(values, number)
                yield family


def _families(status: RunStatus) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    """Name, explanation and samples of each figure."""
    jobs = status.jobs

    def each(key: str, factor: float = 1) -> list[Sample]:
        values = [(j, getattr(j, key)) for j in jobs]
        return [(_labels(j), None if v is None else v * factor) for j, v in values]

    yield "status_timestamp_seconds", "When these figures were gathered.", [({}, status.time)]
    states: list[Sample] = [({"state": s}, s == status.state) for s in STATES]
    yield "run_state", "1 for the state that the run is in.", states
    states = [(_labels(j, state=s), s == j.state) for j in jobs for s in STATES]
    yield "job_state", "1 for the state that a job is in.", states
    units = [(_labels(j, unit=j.unit or ""), j) for j in jobs if j.state in AT_WORK]
    yield "job_done_units", "Units done by a running job.", [(n, j.done) for n, j in units]
    yield "job_units", "Units that a running job has to do.", [(n, j.total) for n, j in units]
    yield "job_units_per_second", "Rate of a running job.", [(n, j.rate) for n, j in units]
    yield "job_remaining_seconds", "Remaining time of a job.", each("remaining_seconds")
    yield "job_duration_seconds", "Time that a job took, or has been running.", each("seconds")
    about = "Last sign of a job's supervisor or log."
    yield "job_heartbeat_timestamp_seconds", about, each("updated")
    yield "job_progress_timestamp_seconds", "Last progress of a job.", each("last_progress")
    yield "job_memory_bytes", "Resident memory of a job's processes.", each("memory_gib", GIB)
    yield "job_busy_cores", "Processor cores that a job keeps busy.", each("cores_busy")
    losses: list[Sample] = [(_labels(j), j.losses[-1]) for j in jobs if j.losses]
    yield "job_loss", "Last training loss.", losses
    messages: list[Sample] = [
        (_labels(j, **{"class": k}), n) for j in jobs for k, n in j.warnings.items()
    ]
    yield "job_messages", "Messages in a job's log by class.", messages
    gpus = [
        (_labels(j, host=j.host, gpu=g.index), g)
        for j in jobs
        if j.state == "running"
        for g in j.gpus
    ]
    use: list[Sample] = [(n, g.use_percent and g.use_percent * 0.01) for n, g in gpus]
    yield "gpu_use_ratio", "Use of a job's GPU.", use
    memory: list[Sample] = [(n, g.memory_gib and g.memory_gib * GIB) for n, g in gpus]
    yield "gpu_memory_bytes", "Memory used of a job's GPU.", memory
    yield "gpu_power_watts", "Power that a job's GPU draws.", [(n, g.power_w) for n, g in gpus]
    about = "Tokens a verifier step, measured."
    yield "acceptance_length_tokens", about, _measured(jobs, "measure_acceptance", "prompt_set")
    about = "Speed with the drafter by speed without."
    yield "speedup_ratio", about, _measured(jobs, "measure_speed", "concurrency")
    disks: list[Sample] = [({"path": d.path}, d.free_gib * GIB) for d in status.disks]
    yield "disk_free_bytes", "Free space of a disk that the run writes to.", disks
    unreadable: list[Sample] = [({}, len(status.unreadable))]
    yield "unreadable_files", "Files that could not be read.", unreadable


def _labels(job: JobView, **more: object) -> dict[str, object]:
    return {"stage": job.stage, "part": job.part, **more}


def _measured(jobs: list[JobView], stage: str, label: str) -> list[Sample]:
    found = [j for j in jobs if j.stage == stage]
    return [({"drafter": j.part, label: k}, v) for j in found for k, v in j.figures.items()]
