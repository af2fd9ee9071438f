"""Rates that earlier runs of the verifier show: seconds a token, a record, an operation."""

from dataclasses import dataclass
from pathlib import Path

from aerie.common.errors import InputError
from aerie.common.files import read_optional
from aerie.common.stages import benchmark_seconds
from aerie.config.drafter import Drafter
from aerie.corpus.report import PromptsReport
from aerie.drafter.metrics import read_metrics
from aerie.evaluation.results import Acceptance, Speed
from aerie.generation.manifest import ResponsesManifest
from aerie.planning.costs import drafter_parameters, training_operations
from aerie.planning.shape import Shape
from aerie.samples.report import SamplesReport
from aerie.states.manifest import LaneManifest
from aerie.verifier.fingerprint import FINGERPRINT, Fingerprint

FROM_STORE_SECONDS = 10
"""A measurement in the engine that took less found its answers in the store."""


@dataclass(frozen=True)
class Rate:
    """Seconds a unit, seconds that every job takes besides, and the run that showed them."""

    seconds_each: float
    fixed: float
    source: str

    def seconds(self, units: float) -> float:
        return self.fixed + units * self.seconds_each if units else 0.0


def earlier_runs(fingerprint: Fingerprint | None, run: Path) -> list[Path]:
    """Folders of the runs with this verifier beside `run`; `run` itself comes last."""
    found = []
    for path in sorted(run.parent.glob(f"*/{FINGERPRINT}")):
        other = Fingerprint.find(path)
        if fingerprint and other and other.fingerprint == fingerprint.fingerprint:
            found.append(path.parent.parent)
    return sorted(found, key=lambda p: p == run)


def measured_rates(run: Path, shape: Shape | None) -> dict[str, Rate]:
    """Rates by stage that the finished run in the folder `run` shows.

    A stage that found its work in the store shows none. Units: generated tokens, extracted tokens,
    10⁹ operations of training (needs `shape`), prompts measured times tokens an answer, records for
    the others.
    """
    rates: dict[str, Rate] = {}
    seconds = {p.parent.name: benchmark_seconds(p) for p in run.glob("benchmarks/*/run.tsv")}
    made = ResponsesManifest.find(run / "responses/manifest.json")
    if made and made.generated and made.generated_tokens:
        tokens = made.generated_tokens * made.generated / made.records
        working = made.seconds - made.load_seconds
        before = max(0.0, seconds.get("generate_responses", 0) - working)
        rates["generate_responses"] = Rate(working / tokens, before, run.name)
    for path in sorted(run.glob("hidden_states/lane-*.json")):
        lane = LaneManifest.find(path)
        if lane and lane.extracted_tokens:
            each = lane.seconds / lane.extracted_tokens
            rates["extract_hidden_states"] = Rate(each, 0.0, run.name)
    for stage, report in (
        ("collect_prompts", PromptsReport.find(run / "prompts/report.json")),
        ("tokenize_samples", SamplesReport.find(run / "samples/report.json")),
    ):
        if report and report.records_in and seconds.get(stage):
            rates[stage] = Rate(seconds[stage] / report.records_in, 0.0, run.name)
    for stage in ("import_verifier", "render_report"):
        if seconds.get(stage):
            rates[stage] = Rate(0.0, seconds[stage], run.name)
    maps = [benchmark_seconds(p) for p in run.glob("benchmarks/map_vocabulary/*.tsv")]
    if maps:
        rates["map_vocabulary"] = Rate(0.0, max(maps), run.name)
    for drafter in sorted(run.glob("drafters/*")):
        if shape and (rate := _training_rate(run, drafter, shape)):
            rates["train_drafter"] = rate
        rates |= _measuring_rates(run, drafter.name)
    return rates


def _measuring_rates(run: Path, name: str) -> dict[str, Rate]:
    """Rates of the measurements of one drafter."""
    rates: dict[str, Rate] = {}
    acceptance = Acceptance.find(run / "evaluation" / name / "acceptance.json")
    took = benchmark_seconds(run / "benchmarks/measure_acceptance" / f"{name}.tsv")
    sets = acceptance.prompt_sets.values() if acceptance else ()
    tokens = sum(s.generated_tokens for s in sets)
    if tokens and took > FROM_STORE_SECONDS:
        rates["measure_acceptance"] = Rate(took / tokens, 0.0, run.name)
    speed = Speed.find(run / "evaluation" / name / "speed.json")
    timed = speed.without + speed.with_ if speed else []
    took = benchmark_seconds(run / "benchmarks/measure_speed" / f"{name}.tsv")
    working = sum(x.seconds for x in timed)
    if timed and took > working:
        tokens = sum(x.generated_tokens for x in timed)
        rates["measure_speed"] = Rate(working / tokens, took - working, run.name)
    return rates


def _training_rate(run: Path, folder: Path, shape: Shape) -> Rate | None:
    """Seconds per 10⁹ operations of the training of the drafter in `folder`.

    None when it was found in the store: a training takes about as long as the steps in its metrics.
    """
    took = benchmark_seconds(run / "benchmarks/train_drafter" / f"{folder.name}.tsv")
    config = read_optional(folder / "model/config.json")
    try:
        samples = SamplesReport.read(run / "samples/report.json").train
        steps = [x for x in read_metrics(folder / "metrics.jsonl") if not x.validation]
        epochs = steps[-1].epoch + 1
        ttt_steps = len(steps[-1].accuracy)
        speed = sorted(x.tokens_per_second or 0.0 for x in steps)[len(steps) // 2]
        tokens = samples.tokens * epochs
        drafter = Drafter(
            vocabulary=config["draft_vocab_size"],
            num_layers=config["transformer_layer_config"]["num_hidden_layers"],
        )
        aux = len(config.get("eagle_aux_hidden_state_layer_ids") or [1, 1, 1])
    except (InputError, ValueError, KeyError, IndexError):
        return None
    if not speed or took < 0.7 * tokens / speed:
        return None
    size = drafter_parameters(shape, drafter, aux)
    operations = training_operations(size, ttt_steps, tokens)
    return Rate(took / (operations / 1e9), 0.0, run.name)
