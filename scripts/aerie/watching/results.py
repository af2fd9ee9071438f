"""What came out of a finished job, by stage: in words and as numbers."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

from aerie.common.formatting import GIB, as_count, as_share
from aerie.common.stages import OUTPUTS
from aerie.common.text import printable_lines
from aerie.corpus.report import PromptsReport
from aerie.drafter.metrics import MetricsLine
from aerie.evaluation.results import Acceptance, Speed
from aerie.generation.manifest import ResponsesManifest
from aerie.generation.self_prompts_report import SelfPromptsReport
from aerie.samples.coverage import Coverage
from aerie.samples.report import SamplesReport
from aerie.states.manifest import LaneManifest
from aerie.verifier.fingerprint import Fingerprint
from aerie.watching.run_files import read_tail

Result = tuple[str, dict[str, float]]
METRICS_TAIL = 1 << 18  # bytes read at the end of a training's metrics


def read_result(folder: Path, stage: str, part: str) -> Result | None:
    """The result of this job of the run in `folder`; None when it has none.

    Raises `InputError` for a file that cannot be read, `ValueError` or `LookupError` for metrics
    whose last lines are damaged or absent.
    """
    read = RESULTS.get(stage)
    if read is None:
        return None
    path = folder / OUTPUTS[stage].format(part=part)
    try:
        info = path.stat()
        words, figures = _remembered(read, path, info.st_mtime_ns, info.st_size)
    except FileNotFoundError:
        return None
    return printable_lines(words), {k: v for k, v in figures.items() if math.isfinite(v)}


def _of_verifier(path: Path) -> Result:
    found = Fingerprint.read(path)
    words = f"{found.folder.name}, {found.num_layers} layers of {as_count(found.hidden_size)}"
    return words, {"layers": found.num_layers, "hidden_size": found.hidden_size}


def _of_prompts(path: Path) -> Result:
    found = PromptsReport.read(path)
    kept, taken, heldout = found.records_kept, found.records_in, found.heldout
    words = f"{as_count(kept)} of {as_count(taken)} records, {as_count(heldout)} held out"
    return words, {"records": kept, "records_in": taken, "heldout": heldout}


def _of_self_prompts(path: Path) -> Result:
    found = SelfPromptsReport.read(path)
    words = f"{as_count(found.kept)} of {as_count(found.attempted)} attempts kept"
    return words, {"prompts": found.kept, "attempts": found.attempted}


def _of_responses(path: Path) -> Result:
    found = ResponsesManifest.read(path)
    answers, tokens = found.answers, found.generated_tokens
    words = f"{as_count(answers)} answers, {as_count(tokens)} tokens"
    words += f", {as_count(found.truncated)} cut" if found.truncated else ""
    words += f", {as_count(found.reused)} from the store" if found.reused else ""
    return words, {"answers": answers, "tokens": tokens, "truncated": found.truncated}


def _of_samples(path: Path) -> Result:
    found = SamplesReport.read(path)
    kept, taken = found.records_kept, found.records_in
    tokens = found.train.tokens + found.heldout.tokens
    words = f"{as_count(kept)} of {as_count(taken)} records, {as_count(tokens)} tokens"
    return words, {"records": kept, "records_in": taken, "tokens": tokens}


def _of_map(path: Path) -> Result:
    covered = Coverage.read(path).covered
    return f"{as_share(covered)} of the target tokens", {"covered_share": covered}


def _of_lane(path: Path) -> Result:
    found = LaneManifest.read(path)
    shards, tokens, size = len(found.shards), found.tokens, found.bytes
    words = f"{as_count(shards)} shards, {as_count(tokens)} tokens, {size / GIB:,.2f} GiB"
    lost = len(found.quarantined)
    words += f", {as_count(lost)} samples left out" if lost else ""
    return words, {"shards": shards, "tokens": tokens, "bytes": size, "left_out": lost}


def _of_training(path: Path) -> Result:
    texts = read_tail(path, METRICS_TAIL).splitlines()
    lines = [MetricsLine.parse(json.loads(text), path) for text in texts]
    steps = [x for x in lines if not x.validation]
    checked = [x for x in lines if x.validation]
    last = (checked or steps)[-1]
    figures = {"steps": steps[-1].step + 1, "loss": last.loss}
    figures["expected_acceptance_length"] = 1 + sum(last.accuracy)
    words = f"{as_count(figures['steps'])} steps, {'validation ' * bool(checked)}loss "
    words += f"{last.loss:.3f}"
    if (count := len(last.accuracy)) > 1:
        words += f" (sum of {count} TTT steps)"
    words += f", {figures['expected_acceptance_length']:.2f} tokens a step expected"
    return words, figures


def _of_acceptance(path: Path) -> Result:
    found = Acceptance.read(path)
    figures = {"heldout": found.acceptance_length}
    figures |= {name: values.acceptance_length for name, values in found.prompt_sets.items()}
    positions = " ".join(f"{p:.3f}" for p in found.acceptance_per_position)
    words = ", ".join(f"{name} {length:.2f}" for name, length in figures.items())
    return f"tokens a step {words}; by position {positions}", figures


def _of_speed(path: Path) -> Result:
    figures = {str(x.concurrency): x.ratio for x in Speed.read(path).speedup}
    words = ", ".join(f"{ratio:.2f} times at concurrency {n}" for n, ratio in figures.items())
    return f"speed {words}", figures


RESULTS: dict[str, Callable[[Path], Result]] = {
    "import_verifier": _of_verifier,
    "write_prompts": _of_self_prompts,
    "collect_prompts": _of_prompts,
    "generate_responses": _of_responses,
    "tokenize_samples": _of_samples,
    "map_vocabulary": _of_map,
    "extract_hidden_states": _of_lane,
    "train_drafter": _of_training,
    "measure_acceptance": _of_acceptance,
    "measure_speed": _of_speed,
}
"""Stage → what reads its `OUTPUTS`."""


@functools.lru_cache(maxsize=4096)
def _remembered(read: Callable[[Path], Result], path: Path, changed: int, size: int) -> Result:
    """Read a file once while it is watched: a lane's manifest may have megabytes."""
    return read(path)
