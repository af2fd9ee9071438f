"""Records, samples and tokens of a run: counted where earlier stages are done, else estimated."""

import time
from dataclasses import dataclass
from pathlib import Path

from aerie.common.files import read_json_lines
from aerie.config import Config
from aerie.corpus.cleaning import characters, cleaned, heldout_border, prompt_hash
from aerie.corpus.prompt_sets import read_prompt_file
from aerie.corpus.records import Meter
from aerie.corpus.report import PromptsReport
from aerie.corpus.sources import check_files, new_tallies
from aerie.generation.manifest import ResponsesManifest
from aerie.planning.dry_run import Planned
from aerie.samples.report import SamplesReport

COUNT_SECONDS = 4.0
"""How long the sources are read to count the prompts; the rest of a larger corpus is estimated."""
ANSWER_SHARE = 0.8
"""Mean answer by `generation.max_tokens`, where no earlier run of this verifier shows it."""
CHARACTERS_PER_TOKEN = 4.0
TEMPLATE_TOKENS = 30
"""Tokens of a chat template around a turn, where no earlier run shows the length of a prompt."""
PROMPT_CHARACTERS = 400
"""Mean length of a record whose text was not read."""

SPLITS = ("train", "heldout")
Ids = dict[str, list[str]]
"""Split → ids of its records."""


@dataclass
class Counts:
    """`splits`: ids of the records, None where the samples are done or the sources were read in
    part. `basis`: what the numbers rest on. `shards` is known when the store was looked at."""

    records: int
    heldout: int
    samples: int
    tokens: int
    train_tokens: int
    supervised_tokens: int
    generated_tokens: int
    basis: str
    shards: int = 0
    splits: Ids | None = None
    tokenized: bool = False
    """Whether the samples are done: then all numbers are exact."""

    @property
    def mean_sample(self) -> float:
        """Tokens a sample."""
        return self.tokens / max(1, self.samples)


@dataclass
class PromptCount:
    """The corpus as `collect_prompts` reads it. `characters`: mean length of a record; `whole`:
    all was read, else `records` is estimated from the bytes left."""

    splits: Ids
    records: int
    characters: float
    whole: bool


def count_prompts(config: Config, run: Path) -> PromptCount:
    """The prompts of the sources.

    Near duplicates and contaminated records are not taken out, so the count is an upper bound.
    """
    corpus, meter = config.corpus, Meter()
    total = check_files(corpus.sources, run / "prompts")
    tallies = new_tallies(corpus.sources)
    ids: list[str] = []
    hashes: list[int] = []
    length, whole, start = 0, True, time.monotonic()
    for found in cleaned(corpus, config.generation.mode, tallies, meter):
        ids.append(found.conversation["id"])
        hashes.append(prompt_hash(found.conversation))
        length += characters(found.conversation)
        if len(ids) % 500 == 0 and time.monotonic() - start > COUNT_SECONDS:
            whole = False
            break
    records = len(ids)
    if not whole and meter.done:
        records = max(records, round(records * total / meter.done))
        records = min(records, corpus.limit or records)
    border, _ = heldout_border(hashes, corpus.heldout_share)
    splits = {
        "train": [i for i, h in zip(ids, hashes, strict=True) if h >= border],
        "heldout": [i for i, h in zip(ids, hashes, strict=True) if h < border],
    }
    return PromptCount(splits, records, length / max(1, len(ids)), whole)


@dataclass(frozen=True)
class EarlierRun:
    """What a run with the same verifier wrote: its samples' report and, where answers were
    generated, their manifest."""

    name: str
    samples: SamplesReport
    manifest: ResponsesManifest | None


def read_earlier_run(folder: Path) -> EarlierRun | None:
    """None when the run in `folder` has no samples yet."""
    report = SamplesReport.find(folder / "samples/report.json")
    manifest = ResponsesManifest.find(folder / "responses/manifest.json")
    return EarlierRun(folder.name, report, manifest) if report else None


def count(config: Config, run: Path, planned: Planned, earlier: EarlierRun | None) -> Counts:
    """The numbers of this run. `planned`: a stage that is not in it is done."""
    if "tokenize_samples" not in planned:
        return count_samples(config, run)
    splits: Ids | None
    if "collect_prompts" not in planned:
        splits = {
            name: [r["id"] for r in read_json_lines(run / f"prompts/{name}.jsonl.zst")]
            for name in SPLITS
        }
        records, basis, length = sum(map(len, splits.values())), "counted in the prompts", None
    else:
        counted = count_prompts(config, run)
        splits = counted.splits if counted.whole else None
        records, length = counted.records, counted.characters
        basis = "counted in the sources" if splits else "estimated from a part of them"
    share = config.corpus.heldout_share
    heldout = len(splits["heldout"]) if splits else round(records * share)
    written = config.self_prompts.number if "collect_prompts" in planned else 0
    records, heldout = records + written, heldout + round(written * share)
    means = mean_lengths(config, earlier, length)
    samples = round(records * means.samples)
    tokens = min(round(samples * means.sample), samples * config.samples.max_length)
    generated = round(records * means.answer)
    return Counts(
        records=records,
        heldout=heldout,
        samples=samples,
        tokens=tokens,
        train_tokens=round(tokens * (1 - share)),
        # Where the corpus has its own answers, their length is not known before tokenizing.
        supervised_tokens=min(tokens, generated) or tokens,
        generated_tokens=generated,
        basis=f"prompts {basis}; lengths {means.basis}",
        splits=splits,
    )


def count_samples(config: Config, run: Path) -> Counts:
    """The numbers of a run whose samples are done."""
    report = SamplesReport.read(run / "samples/report.json")
    train, heldout = report.train, report.heldout
    records = report.records_in
    prompts = PromptsReport.find(run / "prompts/report.json")
    answers = ResponsesManifest.find(run / "responses/manifest.json")
    return Counts(
        records=records,
        heldout=prompts.heldout if prompts else round(records * config.corpus.heldout_share),
        samples=train.samples + heldout.samples,
        tokens=train.tokens + heldout.tokens,
        train_tokens=train.tokens,
        supervised_tokens=train.supervised_tokens + heldout.supervised_tokens,
        generated_tokens=answers.generated_tokens if answers else 0,
        basis="counted in the samples",
        tokenized=True,
    )


@dataclass(frozen=True)
class Means:
    """Mean tokens of an answer (by record) and of a sample; `samples` a record."""

    answer: float
    sample: float
    samples: float
    basis: str


def mean_lengths(config: Config, earlier: EarlierRun | None, length: float | None) -> Means:
    """Mean lengths of an earlier run, else assumed. `length`: characters of a record."""
    generating = config.generation.mode == "generate"
    if earlier and bool(earlier.manifest) == generating:
        report, manifest = earlier.samples, earlier.manifest
        samples = report.train.samples + report.heldout.samples
        sample = (report.train.tokens + report.heldout.tokens) / samples
        answer = 0.0
        if manifest:
            answer = manifest.generated_tokens / manifest.records
            old, new = manifest.sampling.max_tokens, config.generation.max_tokens
            cut = manifest.truncated / max(1, manifest.answers)
            # A shorter limit cuts in proportion; of a longer one, cut answers use about half.
            changed = answer * new / old if new < old else answer + cut * (new - old) / 2
            sample, answer = sample + changed - answer, changed
        basis = f"of the run {earlier.name}"
        return Means(answer, sample, samples / report.records_in, basis)
    prompt = (length or PROMPT_CHARACTERS) / CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS
    answer = ANSWER_SHARE * config.generation.max_tokens if generating else 0.0
    basis = (
        f"assumed: {CHARACTERS_PER_TOKEN:.0f} characters a token, answers of {ANSWER_SHARE:.0%} of "
        "max_tokens"
    )
    return Means(answer, prompt + answer, 1.0, basis)


def measured_prompts(config: Config, heldout: int) -> int:
    """Prompts that acceptance is measured on, all sets together."""
    sets = [len(read_prompt_file(Path(p))) for p in config.evaluation.prompt_sets.values()]
    return sum(min(number, config.evaluation.max_prompts) for number in [heldout, *sets])
