"""The results of a run, as the report and the summary read them from its folder.

The summary in the terminal must start at once, so nothing heavy is imported here.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aerie.common.errors import InputError
from aerie.common.files import read_json, read_json_lines
from aerie.common.stages import STAGES, read_benchmark
from aerie.common.text import beginning

if TYPE_CHECKING:
    from aerie.config import Config
    from aerie.config.drafter import Drafter as DrafterSettings

EXAMPLES = 3
"""Examples shown of each reason for which records were left out."""
REPORTED_SECTIONS = (
    *("run", "verifier", "corpus", "self_prompts", "generation", "samples", "hidden_states"),
    *("engine", "drafters", "evaluation"),
)
"""Sections of the configuration that determine the results; a change of another one makes no other
report."""
SPLITS = {"train": "training", "heldout": "held-out"}


@dataclass(frozen=True)
class Expectation:
    """Validation's cumulative accuracy beside what was served.

    Compared on the first `positions` drafted tokens: as many as both drafted. `expected` =
    1 + Σ accuracy and `served` = 1 + Σ acceptance over these positions, tokens a verifier step.
    """

    positions: int
    accuracy: list[float]
    expected: float
    served: float

    @property
    def gap(self) -> float:
        return self.expected - self.served


@dataclass(frozen=True)
class Speed:
    """Speed at one `concurrency` on `prompts` prompts.

    `without`, `with_drafter`: tokens a second; `seconds_without`, `seconds_with`: time per output
    token; `ratio` of the two speeds. `step_cost`: how much longer a step takes with the drafter,
    and so the acceptance length from which it pays. It uses the acceptance length on all held-out
    prompts; the timed ones are some of them.
    """

    concurrency: int
    prompts: int
    without: float
    with_drafter: float
    seconds_without: float
    seconds_with: float
    ratio: float
    step_cost: float


@dataclass
class Drafter:
    """One drafter: its settings, the lines of its metrics, and its measurements.

    `settings` is None for the summary, which needs none.
    """

    name: str
    settings: "DrafterSettings | None"
    metrics: list[dict[str, Any]]
    acceptance: dict[str, Any]
    speed: dict[str, Any]
    model: Path

    @property
    def vocabulary(self) -> int | str | None:
        return self.settings.vocabulary if self.settings else None

    @property
    def training(self) -> list[dict[str, Any]]:
        return [x for x in self.metrics if not x.get("validation")]

    @property
    def validation(self) -> list[dict[str, Any]]:
        return [x for x in self.metrics if x.get("validation")]

    @property
    def tokens_drafted(self) -> int:
        """Tokens drafted a step when it was measured (K)."""
        return len(self.acceptance["acceptance_per_position"])

    @property
    def expectation(self) -> Expectation | None:
        """None when no validation was recorded."""
        if not self.validation:
            return None
        accuracy = self.validation[-1]["accuracy"]
        served = self.acceptance["acceptance_per_position"]
        n = min(len(accuracy), len(served))
        return Expectation(n, accuracy, 1 + sum(accuracy[:n]), 1 + sum(served[:n]))

    @property
    def speeds(self) -> list[Speed]:
        """By concurrency, in the order of the measurement."""
        ratios = {r["concurrency"]: r["ratio"] for r in self.speed["speedup"]}
        return [
            Speed(
                concurrency=a["concurrency"],
                prompts=a["prompts"],
                without=a["tokens_per_second"],
                with_drafter=b["tokens_per_second"],
                seconds_without=a["time_per_output_token_s"],
                seconds_with=b["time_per_output_token_s"],
                ratio=ratios[a["concurrency"]],
                step_cost=self.acceptance["acceptance_length"] / ratios[a["concurrency"]],
            )
            for a, b in zip(self.speed["without"], self.speed["with"], strict=True)
        ]


@dataclass(frozen=True)
class Duration:
    """Snakemake's measurement of a job; `part`: its wildcard, or empty; `memory_mb`: its peak."""

    stage: str
    part: str
    seconds: float
    memory_mb: float | None


@dataclass
class Run:
    """Everything the report is made of. `responses` is None where answers were not generated,
    `coverage` (by draft vocabulary size) is empty where every drafter has the full vocabulary."""

    folder: Path
    config: "Config"
    verifier: dict[str, Any]
    prompts: dict[str, Any]
    responses: dict[str, Any] | None
    samples: dict[str, Any]
    coverage: dict[int, dict[str, Any]]
    lanes: list[dict[str, Any]]
    drafters: list[Drafter]
    durations: list[Duration] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    """Records that are examples of a loss, by id: where each is and how its prompt begins."""

    @property
    def name(self) -> str:
        return self.config.run

    def covered(self, drafter: Drafter) -> float | None:
        """Share of the target tokens within the drafter's vocabulary.

        None for the full one, and for a drafter that keeps its checkpoint's own.
        """
        if drafter.settings is None or drafter.settings.from_checkpoint:
            return None
        size = drafter.settings.vocabulary
        found = None if size == "full" else self.coverage.get(size)
        return found["covered"] if found else None

    def quarantined(self) -> dict[str, list[str]]:
        """Samples that could not be extracted, by reason."""
        found: dict[str, list[str]] = {}
        for lane in self.lanes:
            for identity, reason in lane.get("quarantined", {}).items():
                found.setdefault(reason, []).append(identity)
        return found

    def describe_sample(self, sample: str) -> str:
        """Where the sample's record is and how its prompt begins; else the sample's id."""
        return self.shown.get(record_of(sample), sample)


def record_of(sample: str) -> str:
    """Id of a sample's record; further samples of a record have a number appended."""
    return sample.partition("-")[0]


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON object that has these keys; `InputError` says which are missing."""
    value = read_json(path)
    missing = [k for k in keys if not isinstance(value, dict) or k not in value]
    if missing:
        raise InputError(
            f"{path}: found no {', '.join(missing)}; another version of Aerie wrote it, "
            "or it is damaged: delete it and run again"
        )
    return value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a `metrics.jsonl` (see docs/formats.md); `InputError` names a damaged one."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: not readable ({error})") from error
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            lines.append({**line, "loss": line["loss"], "accuracy": list(line["accuracy"])})
            line["step"], line["epoch"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: line {number} is not a line of metrics ({error!r}); delete the file and "
                "run again"
            ) from error
    return lines


def read_drafter(run: Path, name: str, settings: "DrafterSettings | None" = None) -> Drafter:
    """A drafter of the run in this folder; `InputError` when it was not trained or measured."""
    evaluation = run / "evaluation" / name
    acceptance = read_object(
        evaluation / "acceptance.json",
        "acceptance_length",
        "acceptance_per_position",
        "num_drafts",
        "num_accepted_tokens",
        "prompt_sets",
    )
    speed = read_object(evaluation / "speed.json", "without", "with", "speedup")
    folder = run / "drafters" / name
    metrics = read_metrics(folder / "metrics.jsonl")
    return Drafter(name, settings, metrics, acceptance, speed, folder / "model")


def read_run(folder: Path, names: list[str], config: "Config") -> Run:
    """All that the report shows of a run, with the drafters in this order.

    Raises `InputError` for a file that is absent or damaged.
    """
    unknown = [n for n in names if n not in config.drafters]
    if unknown:
        raise InputError(
            f"--drafters: {', '.join(unknown)} not among those of the configuration: "
            f"{', '.join(config.drafters)}"
        )
    drafters = [read_drafter(folder, n, config.drafters[n]) for n in names]
    sizes = sorted({v for d in drafters if isinstance(v := d.vocabulary, int)})
    lanes = range(config.hidden_states.lanes)
    generated = config.generation.mode == "generate"
    counts = ("records_in", "records_kept", "dropped", "examples")
    run = Run(
        folder=folder,
        config=config,
        verifier=read_object(folder / "verifier/fingerprint.json", "source", "path", "fingerprint"),
        prompts=read_object(
            folder / "prompts/report.json", "records_in", "records_kept", "sources"
        ),
        responses=read_object(folder / "responses/manifest.json", "records", "truncated")
        if generated
        else None,
        samples=read_object(folder / "samples/report.json", *counts, *SPLITS),
        coverage={
            size: read_object(folder / f"vocabulary/{size}/coverage.json", "covered", "coverage")
            for size in sizes
        },
        lanes=[
            read_object(folder / f"hidden_states/lane-{i}.json", "shards", "tokens", "bytes")
            for i in lanes
        ],
        drafters=drafters,
        durations=read_durations(folder / "benchmarks", names, sizes, len(lanes)),
    )
    examples = [i for ids in run.samples["examples"].values() for i in ids]
    examples += [i for ids in run.quarantined().values() for i in ids[:EXAMPLES]]
    run.shown.update(describe_records(folder / "prompts", {record_of(i) for i in examples}))
    return run


def describe_records(folder: Path, ids: set[str]) -> dict[str, str]:
    """Of each of these records: its line in the collected prompts, its source, and how its prompt
    begins."""
    found = {}
    for split in SPLITS if ids else ():
        path = folder / f"{split}.jsonl.zst"
        for number, record in enumerate(read_json_lines(path) if path.is_file() else (), 1):
            if record["id"] in ids:
                where = f"{path.name} line {number}, {record['source']}"
                found[record["id"]] = f"{where}: {beginning(record)}"
    return found


def read_durations(
    folder: Path, drafters: list[str], sizes: list[int], lanes: int
) -> list[Duration]:
    """Snakemake's measurements of the jobs, in the order of the stages.

    Jobs without a measurement, and those of drafters, sizes and lanes that the run no longer has,
    are left out.
    """
    parts = {
        "map_vocabulary": [str(s) for s in sizes],
        "extract_hidden_states": [str(i) for i in range(lanes)],
        "train_drafter": drafters,
        "measure_acceptance": drafters,
        "measure_speed": drafters,
    }
    found = []
    for stage in STAGES[:-1]:  # the report itself is not made yet
        for part in parts.get(stage, ["run"]):
            row = read_benchmark(folder / stage / f"{part}.tsv")
            seconds = _number(row.get("s"))
            if seconds is not None:
                part = "" if part == "run" else part
                found.append(Duration(stage, part, seconds, _number(row.get("max_rss"))))
    return found


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
