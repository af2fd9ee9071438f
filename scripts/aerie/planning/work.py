"""What each stage has to do, and how long that takes by the hardware table."""

from dataclasses import dataclass

from aerie.config import Config
from aerie.planning import costs, hardware
from aerie.planning.counts import ANSWER_SHARE, Counts, measured_prompts
from aerie.planning.hardware import Hardware
from aerie.planning.kept import Kept
from aerie.planning.needs import aux_states
from aerie.planning.shape import VerifierSize, parameters

OPERATIONS = "10⁹ operations"
GPU_READ, CPU_READ = 3e12, 1.5e10
"""Bytes a second at which one device reads its weights, where nothing else limits an answer."""


@dataclass(frozen=True)
class Work:
    """`units` of `unit` take `seconds`, on `gpus` GPUs at a time; no unit: a fixed time."""

    units: float = 0
    unit: str = ""
    seconds: float = 0.0
    gpus: int = 0


@dataclass
class OnePass:
    """`tokens` whose states are saved while they are generated, and the `seconds` of extraction
    that this saves."""

    tokens: int
    seconds: float


def fixed_work(records: int) -> dict[str, Work]:
    """Work by stage that does not depend on the verifier."""
    return {
        "import_verifier": Work(seconds=30.0),
        "collect_prompts": Work(records, "records", 2 + records / 5000),
        "tokenize_samples": Work(records, "records", 10 + records / 500),
        "map_vocabulary": Work(seconds=10.0),
        "render_report": Work(seconds=10.0),
    }


def model_work(
    config: Config,
    size: VerifierSize,
    counts: Counts,
    kept: Kept,
    machine: Hardware,
    stored_bytes: float,
) -> tuple[dict[str, Work], OnePass | None]:
    """Work by stage that runs the verifier or trains a drafter. `stored_bytes`: of one token."""
    gpus = config.engine.tensor_parallel_size if machine.gpus else 0
    devices = max(1, gpus)
    active = parameters(size.shape)[1]
    start = hardware.start_seconds(machine, size.weights)

    def engine(prompt: float, new: float, written: float) -> float:
        operations = costs.generation_operations(active, prompt, new)
        busy = hardware.engine_seconds(machine, devices, operations, written)
        return start + busy if prompt or new else 0.0

    work: dict[str, Work] = {}
    one_pass = None
    left = counts.tokens - kept.tokens
    if config.generation.mode == "generate":
        missing = max(0.0, 1 - kept.answers / max(1, counts.records))
        new = counts.generated_tokens * missing
        prompts = max(0, counts.tokens - counts.generated_tokens) * missing
        captures = config.generation.capture and not config.generation.endpoints
        written = (prompts + new) * stored_bytes if captures else 0.0
        work["generate_responses"] = Work(new, "new tokens", engine(prompts, new, written), gpus)
        if captures:
            left = kept.later
        if captures and new:
            spared = max(0, counts.tokens - kept.tokens - left)
            seconds = engine(spared, 0, spared * stored_bytes) - (start if left else 0)
            one_pass = OnePass(spared, seconds)
    extraction = engine(left, 0, left * stored_bytes)
    work["extract_hidden_states"] = Work(left, "tokens", extraction, gpus)
    work["train_drafter"] = training_work(config, size, counts, machine, stored_bytes)
    evaluation, names = config.evaluation, len(config.drafters)
    asked = measured_prompts(config, counts.heldout)
    answers = asked * evaluation.max_tokens * names * ANSWER_SHARE
    seconds = engine(asked * counts.mean_sample * names, answers, 0)
    work["measure_acceptance"] = Work(answers, "new tokens", seconds, gpus)
    runs = 2 * names * len(evaluation.concurrencies)
    answer = evaluation.max_tokens * ANSWER_SHARE
    timed = runs * min(evaluation.speed_prompts, counts.heldout) * answer
    # One request at a time: reading all active weights for each token is what takes long.
    read = GPU_READ if gpus else CPU_READ
    each = active * size.shape.weight_bytes_each / read / devices
    each = max(each, 2 * active / (machine.tflops * 1e12))
    work["measure_speed"] = Work(timed, "new tokens", 2 * names * start + timed * each, gpus)
    return work, one_pass


def training_work(
    config: Config, size: VerifierSize, counts: Counts, machine: Hardware, stored_bytes: float
) -> Work:
    """Training of all drafters, one after the other."""
    billions = seconds = 0.0
    for drafter in config.drafters.values():
        p = costs.drafter_parameters(size.shape, drafter, aux_states(config))
        tokens = counts.train_tokens * drafter.epochs
        operations = costs.training_operations(p, drafter.ttt_steps, tokens)
        billions += operations / 1e9
        seconds += hardware.training_seconds(
            machine, max(1, drafter.gpus), operations, tokens * stored_bytes
        )
    return Work(billions, OPERATIONS, seconds, max(d.gpus for d in config.drafters.values()))
