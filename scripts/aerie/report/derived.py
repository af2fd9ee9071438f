"""Figures that the report derives from a run's files."""

from dataclasses import dataclass
from typing import Any

from aerie.report.drafter import TrainedDrafter
from aerie.report.run import SPLITS, Run
from aerie.states.manifest import ManifestConvention


@dataclass(frozen=True)
class StageCount:
    """Records or samples after a stage, by split, or `undivided` where there are no splits yet."""

    label: str
    train: int = 0
    heldout: int = 0
    undivided: int = 0

    @property
    def total(self) -> int:
        return self.train + self.heldout + self.undivided


def counts_by_stage(run: Run) -> list[StageCount]:
    """Records or samples after each stage."""
    prompts, responses = run.prompts, run.responses
    stages = [
        StageCount("records read", undivided=prompts.records_in),
        StageCount("kept after cleaning", prompts.train, prompts.heldout),
    ]
    if responses:
        answered = responses.records - responses.not_answered
        stages.append(StageCount("answered by the verifier", undivided=answered))
    samples = run.samples
    stages.append(StageCount("samples", samples.train.samples, samples.heldout.samples))
    with_states = dict.fromkeys(SPLITS, 0)
    for lane in run.lanes:
        for shard in lane.shards:
            with_states[shard.split] += len(shard.samples)
    stages.append(StageCount("samples with hidden states", **with_states))
    return stages


@dataclass(frozen=True)
class States:
    """Hidden states of all lanes together; sizes in bytes.

    The tokens were captured during generation, extracted, or `kept_tokens` of an earlier run.
    `spared_start`: seconds that a second engine would have taken to start; None when one was
    started, or nothing was captured. `share`: stored by raw bytes. `convention`: that of the
    lanes' manifests.
    """

    samples: int
    tokens: int
    shards: int
    raw_bytes: int
    omitted_bytes: int
    bytes: int
    extracted_samples: int
    extracted_tokens: int
    copied_samples: int
    captured_tokens: int
    kept_tokens: int
    spared_start: float | None
    convention: ManifestConvention | None

    @property
    def share(self) -> float | None:
        return self.bytes / self.raw_bytes if self.raw_bytes else None


def describe_states(run: Run) -> States:
    lanes, responses = run.lanes, run.responses
    tokens = sum(lane.tokens for lane in lanes)
    extracted = sum(lane.extracted_tokens for lane in lanes)
    found = tokens - extracted
    # A later run may want fewer samples than an earlier one captured.
    captured = min(responses.captured.tokens, max(0, found)) if responses else 0
    return States(
        samples=sum(lane.samples for lane in lanes),
        tokens=tokens,
        shards=sum(len(lane.shards) for lane in lanes),
        raw_bytes=sum(lane.raw_bytes for lane in lanes),
        omitted_bytes=sum(lane.omitted_bytes for lane in lanes),
        bytes=sum(lane.bytes for lane in lanes),
        extracted_samples=sum(lane.extracted_samples for lane in lanes),
        extracted_tokens=extracted,
        copied_samples=sum(lane.copied_samples for lane in lanes),
        captured_tokens=captured,
        kept_tokens=max(0, found - captured),
        spared_start=responses.load_seconds if responses and captured and not extracted else None,
        convention=lanes[0].convention if lanes else None,
    )


@dataclass(frozen=True)
class Training:
    """Steps, last losses, and means over all steps; None for what was not recorded."""

    steps: int
    loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    wait_share: float | None


def describe_training(drafter: TrainedDrafter) -> Training:
    lines = drafter.training
    speeds = [x.tokens_per_second for x in lines if x.tokens_per_second]
    waits = [x.wait_share for x in lines if x.wait_share is not None]
    return Training(
        steps=len(lines),
        loss=lines[-1].loss if lines else None,
        validation_loss=drafter.validation[-1].loss if drafter.validation else None,
        tokens_per_second=sum(speeds) / len(speeds) if speeds else None,
        wait_share=sum(waits) / len(waits) if waits else None,
    )


@dataclass(frozen=True)
class MeasuredOn:
    """A machine that speed was measured on, and the names of the drafters."""

    machine: dict[str, Any]
    drafters: list[str]


def machines(run: Run) -> list[MeasuredOn]:
    """The machines that speed was measured on, each once."""
    found: list[MeasuredOn] = []
    for drafter in run.drafters:
        machine = drafter.speed.machine
        if not machine:
            continue
        same = next((m for m in found if m.machine == machine), None)
        if same:
            same.drafters.append(drafter.name)
        else:
            found.append(MeasuredOn(machine, [drafter.name]))
    return found
