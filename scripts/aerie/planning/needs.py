"""Memory and bytes that a run needs, and warnings where they are not there."""

from dataclasses import dataclass
from pathlib import Path

from aerie.common.files import free_bytes
from aerie.common.formatting import GIB
from aerie.common.machine import main_memory
from aerie.config import Config
from aerie.engine.staging import MEMORY
from aerie.planning import costs
from aerie.planning.costs import EngineMemory, TrainingMemory
from aerie.planning.counts import Counts
from aerie.planning.hardware import Hardware
from aerie.planning.kept import Kept
from aerie.planning.shape import Shape, VerifierSize, parameters
from aerie.states.manifest import LaneManifest

DEFAULT_AUX_LAYERS = 3


def aux_states(config: Config) -> int:
    """States that feed the drafter, without the last layer's."""
    return len(config.hidden_states.aux_layer_ids or ()) or DEFAULT_AUX_LAYERS


@dataclass(frozen=True)
class VerifierNeeds:
    """Sizes of the verifier: `weights` and `lm_head` in bytes, `vocabulary` in tokens, and its
    memory on one device of the engine."""

    source: str
    parameters: int
    active_parameters: int
    weights: float
    lm_head: int
    vocabulary: int
    aux_states: int
    memory: EngineMemory


def verifier_needs(
    config: Config, size: VerifierSize, hardware: Hardware
) -> tuple[VerifierNeeds, list[str]]:
    """Sizes of the verifier, and warnings where it does not fit the machine."""
    shape, aux, engine = size.shape, aux_states(config), config.engine
    total, active = parameters(shape)
    gpus = engine.tensor_parallel_size
    memory = costs.engine_memory(
        shape,
        size.weights,
        gpus,
        aux + 1 if config.generation.capture else 0,
        config.samples.max_length,
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
    )
    warnings = []
    room = hardware.gpu_memory_gib * GIB * engine.gpu_memory_utilization
    if hardware.gpus and memory.least > room:
        warnings.append(
            f"the verifier does not fit: {memory.least / GIB:.0f} GiB on each of {gpus} GPUs for "
            f"its weights, a step and one sequence; {hardware.name} has {room / GIB:.0f} GiB "
            f"(gpu_memory_utilization {engine.gpu_memory_utilization}); raise "
            "engine.tensor_parallel_size"
        )
    if hardware.gpus and gpus > hardware.gpus:
        warnings.append(
            f"engine.tensor_parallel_size {gpus}: {hardware.name} has {hardware.gpus} GPUs"
        )
    needs = VerifierNeeds(
        source=config.verifier.source,
        parameters=total,
        active_parameters=active,
        weights=size.weights,
        lm_head=2 * shape.vocab * shape.hidden,
        vocabulary=shape.vocab,
        aux_states=aux,
        memory=memory,
    )
    return needs, warnings


@dataclass(frozen=True)
class DrafterNeeds:
    """Sizes of a drafter in bytes (`vocabulary` in tokens), its memory in training, and the
    `tokens` that it is trained on, all epochs together."""

    vocabulary: int
    head: int
    trained_parameters: int
    model: int
    checkpoint: int
    memory: TrainingMemory
    tokens: int


def drafter_needs(
    config: Config, shape: Shape, counts: Counts, hardware: Hardware
) -> tuple[dict[str, DrafterNeeds], list[str]]:
    """Sizes of the drafters by name, and warnings where training one does not fit."""
    found: dict[str, DrafterNeeds] = {}
    warnings = []
    aux = aux_states(config)
    for name, drafter in config.drafters.items():
        p = costs.drafter_parameters(shape, drafter, aux)
        memory = costs.training_memory(shape, drafter, aux, 2 if drafter.gpus else 4)
        found[name] = DrafterNeeds(
            vocabulary=p.vocabulary,
            head=2 * p.head,
            trained_parameters=p.trained,
            model=costs.drafter_bytes(p),
            checkpoint=costs.checkpoint_bytes(p, drafter.optimizer),
            memory=memory,
            tokens=counts.train_tokens * drafter.epochs,
        )
        limit = hardware.gpu_memory_gib * GIB if drafter.gpus else main_memory()
        if limit and memory.peak > limit:
            warnings.append(
                f"training {name} does not fit: about {memory.peak / GIB:.0f} GiB of "
                f"{limit / GIB:.0f} GiB; the logits take {memory.logits / GIB:.0f}: lower "
                "sequence_length, vocabulary or ttt_steps"
            )
    return found, warnings


@dataclass(frozen=True)
class Bytes:
    """What the run writes. `states_omitted`: states of the last layer left out of `states_raw`;
    `states_new`: of `states_stored`, what the store lacks. `needed`: new states and, if a drafter
    is trained, models and checkpoints."""

    states_raw: float
    states_omitted: float
    states_stored: int
    states_new: int
    staging: int
    drafters: int
    checkpoints: int
    free: int
    staging_free: int
    needed: int


def bytes_needed(
    config: Config,
    run: Path,
    shape: Shape,
    counts: Counts,
    kept: Kept,
    drafters: dict[str, DrafterNeeds],
    trains: bool,
) -> tuple[Bytes, list[str]]:
    """What the run writes, and warnings when it is more than is free. `trains`: a drafter is
    trained."""
    ids = aux_states(config) + 1
    raw = costs.state_bytes(counts.tokens, ids, shape.hidden)
    omitted = 0.0
    if config.hidden_states.last_state == "supervised":
        without = counts.tokens - counts.supervised_tokens
        omitted = costs.state_bytes(without, 1, shape.hidden)
    share = 1.0 if config.hidden_states.format == "raw" else stored_share(run)
    stored = (raw - omitted) * share
    new = round(stored * (1 - kept.tokens / max(1, counts.tokens)))
    in_flight = min(
        counts.samples, 2 * config.engine.max_num_seqs + 2 * config.hidden_states.samples_per_shard
    )
    # The store's copy and the run's.
    models = sum(2 * d.model for d in drafters.values())
    # The old checkpoint is deleted when the new one is whole.
    checkpoints = max(2 * d.checkpoint for d in drafters.values())
    free = free_bytes(Path(config.store))
    found = Bytes(
        states_raw=raw,
        states_omitted=omitted,
        states_stored=round(stored),
        states_new=new,
        staging=round(costs.state_bytes(1, ids, shape.hidden) * counts.mean_sample * in_flight),
        drafters=models,
        checkpoints=checkpoints,
        free=free,
        staging_free=free_bytes(MEMORY) if MEMORY.is_dir() else free,
        needed=new + (models + checkpoints if trains else 0),
    )
    warnings = [
        f"{where}: {need / GIB:.1f} GiB are needed, {there / GIB:.1f} GiB are free"
        for where, need, there in (
            (config.store, found.needed, found.free),
            (f"staging in {MEMORY}", found.staging, found.staging_free),
        )
        if need > there
    ]
    return found, warnings


def stored_share(run: Path) -> float:
    """Stored by raw bytes of lossless states, as the lanes of this run or of another one show."""
    for path in [
        *run.glob("hidden_states/lane-*.json"),
        *run.parent.glob("*/hidden_states/lane-*.json"),
    ]:
        lane = LaneManifest.find(path)
        if lane and lane.raw_bytes and lane.convention.format == "lossless":
            return lane.bytes / (lane.raw_bytes - lane.omitted_bytes)
    return costs.LOSSLESS_SHARE
