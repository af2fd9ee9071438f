"""A plan for people: a table of the stages, and a few lines."""

from typing import Literal

from rich.console import Console
from rich.table import Table

from aerie.common.formatting import as_bytes, as_duration
from aerie.planning.plan import Plan, Stage
from aerie.planning.work import OPERATIONS

PIPE_WIDTH = 150
"""A pipe has no width; a table cut at 80 columns is of no use there."""
COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("stage", "left"),
    ("there", "right"),
    ("to run", "right"),
    ("to do", "right"),
    ("time", "right"),
    ("GPU-hours", "right"),
    ("why", "left"),
    ("rate", "left"),
)


def show(plan: Plan) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    counts, kept = plan.counts, plan.kept
    console.print(
        f"[bold]{plan.run}[/]: {counts.records:,} records, {counts.samples:,} samples, "
        f"{counts.tokens:,} tokens, {counts.shards:,} shards ({counts.basis})"
    )
    console.print(
        f"already in the store: {kept.answers:,} answers, {kept.shards:,} shards with "
        f"{kept.tokens:,} tokens"
    )
    table = Table(box=None, pad_edge=False)
    for title, justify in COLUMNS:
        table.add_column(title, justify=justify)
    for stage in plan.stages:
        table.add_row(*_row(stage))
    console.print(table)
    hardware = plan.hardware
    console.print(
        f"total {as_duration(plan.seconds)}, {plan.gpu_hours:.1f} GPU-hours; where no rate was "
        f"measured: {hardware.name} of config/hardware.yaml ({hardware.note}). Drafters and "
        "measurements that are found in the store take seconds."
    )
    if plan.one_pass:
        console.print(
            f"generation.capture saves the states of {plan.one_pass.tokens:,} tokens while they "
            f"are generated: about {as_duration(plan.one_pass.seconds)} less extraction."
        )
    _show_sizes(console, plan)
    for warning in plan.warnings:
        console.print(f"[bold red]warning:[/] {warning}")


def _row(stage: Stage) -> list[str]:
    reasons = ", ".join(stage.reasons)
    if not stage.jobs:
        return [stage.stage, str(stage.present), "–", "", "", "", reasons, ""]
    # Readers have no use for a number of operations.
    units = stage.unit and stage.unit != OPERATIONS
    return [
        stage.stage,
        str(stage.present),
        str(stage.jobs),
        f"{stage.units:,.0f} {stage.unit}" if units else "",
        as_duration(stage.seconds),
        f"{stage.gpu_hours:.1f}" if stage.gpu_hours else "",
        reasons,
        stage.rate if stage.seconds else "",
    ]


def _show_sizes(console: Console, plan: Plan) -> None:
    """Bytes and memory, where the verifier's sizes are known."""
    b, v = plan.bytes, plan.verifier
    if b is None or v is None:
        return
    omitted = ""
    if b.states_omitted:
        omitted = f" (last_state: supervised leaves out {as_bytes(b.states_omitted)} of the raw)"
    console.print(
        f"\nhidden states {as_bytes(b.states_raw)} raw, {as_bytes(b.states_stored)} stored"
        f"{omitted}, {as_bytes(b.states_new)} of it new; staging {as_bytes(b.staging)} "
        f"(free {as_bytes(b.staging_free)}); drafters {as_bytes(b.drafters)}, checkpoints "
        f"{as_bytes(b.checkpoints)}; needed {as_bytes(b.needed)}, free {as_bytes(b.free)}"
    )
    m = v.memory
    console.print(
        f"verifier {v.parameters / 1e6:,.0f} M parameters; memory of a device: weights "
        f"{as_bytes(m.weights)}, a step {as_bytes(m.activations)}, cache {as_bytes(m.cache_one)} "
        f"a sequence, {as_bytes(m.cache_all)} for all; lm_head {as_bytes(v.lm_head)} "
        f"({v.vocabulary:,} tokens)"
    )
    for name, d in plan.drafters.items():
        console.print(
            f"drafter {name}: head {as_bytes(d.head)} ({d.vocabulary:,} tokens), "
            f"{d.trained_parameters / 1e6:,.1f} M trained, model {as_bytes(d.model)}; training "
            f"peaks at {as_bytes(d.memory.peak)}, {as_bytes(d.memory.logits)} of it logits"
        )
    if plan.hardware.gpus:
        console.print("Memory and times on GPUs are estimates, not measured.")
