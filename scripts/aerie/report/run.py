"""The results of a run, as the report reads them from its folder."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from aerie.common.errors import InputError
from aerie.common.files import read_json_lines
from aerie.common.stages import STAGES, read_benchmark
from aerie.common.text import beginning
from aerie.config import Config
from aerie.corpus.report import PromptsReport
from aerie.generation.manifest import ResponsesManifest
from aerie.report.drafter import TrainedDrafter, read_drafter
from aerie.samples.coverage import Coverage
from aerie.samples.report import SamplesReport
from aerie.states.manifest import LaneManifest
from aerie.verifier.fingerprint import FINGERPRINT, Fingerprint

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
    config: Config
    verifier: Fingerprint
    prompts: PromptsReport
    responses: ResponsesManifest | None
    samples: SamplesReport
    coverage: dict[int, Coverage]
    lanes: list[LaneManifest]
    drafters: list[TrainedDrafter]
    durations: list[Duration] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    """Records that are examples of a loss, by id: where each is and how its prompt begins."""

    @property
    def name(self) -> str:
        return self.config.run

    def covered(self, drafter: TrainedDrafter) -> float | None:
        """Share of the target tokens within the drafter's vocabulary.

        None for the full one, and for a drafter that keeps its checkpoint's own.
        """
        if drafter.settings is None or drafter.settings.from_checkpoint:
            return None
        size = drafter.settings.vocabulary
        found = self.coverage.get(size) if isinstance(size, int) else None
        return found.covered if found else None

    def quarantined(self) -> dict[str, list[str]]:
        """Samples that could not be extracted, by reason."""
        found: dict[str, list[str]] = {}
        for lane in self.lanes:
            for identity, reason in lane.quarantined.items():
                found.setdefault(reason, []).append(identity)
        return found

    def describe_sample(self, sample: str) -> str:
        """Where the sample's record is and how its prompt begins; else the sample's id."""
        return self.shown.get(record_of(sample), sample)


def record_of(sample: str) -> str:
    """Id of a sample's record; further samples of a record have a number appended."""
    return sample.partition("-")[0]


def read_run(folder: Path, names: list[str], config: Config) -> Run:
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
    run = Run(
        folder=folder,
        config=config,
        verifier=Fingerprint.read(folder / FINGERPRINT),
        prompts=PromptsReport.read(folder / "prompts/report.json"),
        responses=ResponsesManifest.read(folder / "responses/manifest.json")
        if config.generation.mode == "generate"
        else None,
        samples=SamplesReport.read(folder / "samples/report.json"),
        coverage={s: Coverage.read(folder / f"vocabulary/{s}/coverage.json") for s in sizes},
        lanes=[LaneManifest.read(folder / f"hidden_states/lane-{i}.json") for i in lanes],
        drafters=drafters,
        durations=read_durations(folder / "benchmarks", names, sizes, len(lanes)),
    )
    examples = [i for ids in run.samples.examples.values() for i in ids]
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


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
