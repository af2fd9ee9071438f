"""What a run would do and need, before it does it: stages, bytes, memory, hours."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aerie.common.stages import OUTPUTS, STAGES
from aerie.config import Config
from aerie.planning.counts import Counts, count, read_earlier_run
from aerie.planning.dry_run import Planned, PlannedJobs
from aerie.planning.hardware import Hardware
from aerie.planning.kept import Kept, find_kept
from aerie.planning.needs import (
    Bytes,
    DrafterNeeds,
    VerifierNeeds,
    bytes_needed,
    drafter_needs,
    verifier_needs,
)
from aerie.planning.rates import Rate, earlier_runs, measured_rates
from aerie.planning.shape import find_verifier_size
from aerie.planning.work import OnePass, Work, fixed_work, model_work
from aerie.verifier.fingerprint import find_fingerprint

FOUND_SECONDS = 5.0
"""What a job takes that finds all its work in the store."""


@dataclass
class Stage:
    """`jobs` to run with short reasons → number of jobs, and `present` outputs. `units` of `unit`
    are to do in `seconds`; `rate` says where that figure comes from."""

    stage: str
    jobs: int
    reasons: dict[str, int]
    present: int
    units: float
    unit: str
    seconds: float
    gpu_hours: float
    rate: str


@dataclass
class Plan:
    """The plan of the run `run`; sizes in bytes, times in seconds.

    `verifier`, `bytes` and `drafters` are unknown (None, None, empty) when the verifier is not on
    this machine; `one_pass` is None when generation captures nothing.
    """

    run: str
    counts: Counts
    kept: Kept
    hardware: Hardware
    stages: list[Stage] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    verifier: VerifierNeeds | None = None
    drafters: dict[str, DrafterNeeds] = field(default_factory=dict)
    bytes: Bytes | None = None
    one_pass: OnePass | None = None

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.stages)

    @property
    def gpu_hours(self) -> float:
        return sum(s.gpu_hours for s in self.stages)

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON holds it, without what is unknown and the ids of the records."""
        found = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        for name in ("splits", "tokenized"):
            del found["counts"][name]
        return {**found, "seconds": self.seconds, "gpu_hours": self.gpu_hours}


def make_plan(config: Config, run: Path, planned: Planned, hardware: Hardware) -> Plan:
    """The plan of the run in the folder `run`, which may not exist yet; earlier runs lie beside it.

    Nothing is started. `planned`: the jobs of a dry run.
    """
    fingerprint = find_fingerprint(config.verifier.source, run.parent, run.name)
    size = find_verifier_size(config.verifier.source, fingerprint)
    rates: dict[str, Rate] = {}
    earlier = None
    for other in earlier_runs(fingerprint, run):
        rates |= measured_rates(other, size.shape if size else None)
        earlier = read_earlier_run(other) or earlier
    counts = count(config, run, planned, earlier)
    plan = Plan(config.run, counts, find_kept(config, run, fingerprint, counts), hardware)
    work = fixed_work(counts.records)
    if size is None:
        plan.warnings.append(
            f"verifier.source {config.verifier.source}: not on this machine, so its sizes are "
            "unknown; fetch its config.json to see bytes, memory and hours"
        )
    else:
        plan.verifier, faults = verifier_needs(config, size, hardware)
        plan.warnings += faults
        plan.drafters, faults = drafter_needs(config, size.shape, plan.counts, hardware)
        plan.warnings += faults
        plan.bytes, faults = bytes_needed(
            config, run, size.shape, counts, plan.kept, plan.drafters, "train_drafter" in planned
        )
        plan.warnings += faults
        share = plan.bytes.states_stored / max(1, counts.tokens)
        more, plan.one_pass = model_work(config, size, counts, plan.kept, hardware, share)
        work |= more
    for stage in STAGES:
        jobs = planned.get(stage, PlannedJobs())
        outputs = len(list(run.glob(OUTPUTS[stage].format(part="*"))))
        if jobs.jobs or outputs:
            rate = rates.get(stage)
            plan.stages.append(
                describe_stage(stage, jobs, outputs, work.get(stage, Work()), rate, hardware)
            )
    if plan.one_pass and (rate := rates.get("extract_hidden_states")):
        plan.one_pass.seconds = rate.seconds(plan.one_pass.tokens)
    return plan


def describe_stage(
    stage: str, jobs: PlannedJobs, present: int, work: Work, rate: Rate | None, hardware: Hardware
) -> Stage:
    """A stage's row: its time by the measured rate if there is one, else by the hardware table."""
    seconds = rate.seconds(work.units or 1) if rate else work.seconds
    if work.unit and not work.units:
        seconds = FOUND_SECONDS
    if not jobs.jobs:
        seconds = 0.0
    return Stage(
        stage=stage,
        jobs=jobs.jobs,
        reasons=dict(jobs.reasons),
        present=present,
        units=work.units,
        unit=work.unit,
        seconds=seconds,
        gpu_hours=seconds * work.gpus / 3600,
        rate=f"measured in {rate.source}" if rate else f"assumed: {hardware.name}",
    )
