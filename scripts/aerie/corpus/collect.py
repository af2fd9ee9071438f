"""Prompts and conversations: read, clean, divide into training and held-out, write.

Every record that goes in is in one of the two files or in a count with a reason.
"""

import array
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard

from aerie.common.errors import InputError
from aerie.common.files import atomic_write
from aerie.common.progress import JobProgress
from aerie.common.text import beginning
from aerie.config import Corpus, Source
from aerie.corpus.cleaning import (
    MB,
    NEAR_DUPLICATES_FROM,
    PERMUTATIONS,
    Contamination,
    cleaned,
    heldout_border,
    near_duplicates,
    prompt_hash,
    signature,
)
from aerie.corpus.conversations import conversations
from aerie.corpus.records import Meter
from aerie.corpus.report import EvaluationSet, PromptsReport, Tally
from aerie.corpus.sources import PROMPT_FILES, check_files, check_source, new_tallies, source_names

NOT_LOST = ("duplicate", "near duplicate", "outside the source's weight")
"""Reasons that do not count against the floor: the text is kept elsewhere, or is not wanted."""


def collect(
    corpus: Corpus,
    mode: str,
    prompt_sets: list[str],
    output: Path,
    progress_log: Path | None = None,
) -> PromptsReport:
    """Write the three `PROMPT_FILES` into `output`, and print what became of the records.

    `mode`: `generate` or `keep`; `prompt_sets`: files of evaluation prompts, which training
    records must not overlap. Memory holds a few hashes of each record, not the records. Raises
    `InputError`, and then writes nothing.
    """
    total = check_files(corpus.sources, output)
    evaluation_sources = [Source(path=path) for path in prompt_sets]
    for source in [*corpus.sources, *evaluation_sources]:
        check_source(source, corpus)
    tallies, meter = new_tallies(corpus.sources), Meter()
    evaluation = _read_evaluation(evaluation_sources, corpus)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{output}: cannot be written to ({error.strerror})") from None
    with tempfile.TemporaryFile(dir=output) as spool:
        hashes = array.array("Q")
        with (
            JobProgress("collecting", total // MB, "MB", progress_log) as progress,
            zstandard.ZstdCompressor(level=1).stream_writer(spool, closefd=False) as packed,
        ):
            for found in cleaned(corpus, mode, tallies, meter, evaluation, progress):
                hashes.append(prompt_hash(found.conversation))
                packed.write(found.line + b"\n")
        remove = _drop_near_duplicates(corpus, spool, len(hashes), tallies, progress_log)
        _check_kept(tallies, corpus)
        kept = array.array("Q", (h for row, h in enumerate(hashes) if row not in remove))
        border, warning = heldout_border(kept, corpus.heldout_share)
        # A report is beside the files that it describes, or there is none.
        (output / PROMPT_FILES[2]).unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            sides = [stack.enter_context(_open_packed(output / name)) for name in PROMPT_FILES[:2]]
            counts = [0, 0]
            for row, line in enumerate(_lines(spool)):
                if row not in remove:
                    side = int(hashes[row] < border)
                    sides[side].write(line)
                    counts[side] += 1
    report = PromptsReport(
        mode=mode,
        records_in=sum(t.records_in for t in tallies.values()),
        records_kept=sum(counts),
        kept_share=round(_kept_share(list(tallies.values())), 6),
        train=counts[0],
        heldout=counts[1],
        heldout_share=corpus.heldout_share,
        dropped=_sum_counts(t.dropped for t in tallies.values()),
        changed=_sum_counts(t.changed for t in tallies.values()),
        warnings=[warning] if warning else [],
        evaluation_sets=evaluation.sets if evaluation else {},
        sources=tallies,
    )
    report.write(output / PROMPT_FILES[2])
    _print_summary(report)
    return report


def _read_evaluation(sources: list[Source], corpus: Corpus) -> Contamination | None:
    """The evaluation prompts; a bad record among them stops the run."""
    if not sources:
        return None
    strict = corpus.model_copy(update={"on_bad_record": "stop", "on_unknown_role": "stop"})
    found = Contamination()
    for source, name in zip(sources, source_names(sources), strict=True):
        prompts = conversations(source, name, strict, "generate", Tally(path=source.path))
        found.sets[name] = EvaluationSet(prompts=0, records_dropped=0)
        for prompt in prompts:
            found.add(name, prompt.conversation)
            found.sets[name].prompts += 1
    return found


def _drop_near_duplicates(
    corpus: Corpus, spool: IO[bytes], count: int, tallies: dict[str, Tally], log: Path | None
) -> dict[int, int]:
    """Near duplicates in the spool, by row: the earlier row. The tallies count them."""
    if corpus.near_duplicates is None or count < NEAR_DUPLICATES_FROM:
        return {}
    signatures = np.empty((count, PERMUTATIONS), np.uint32)
    with JobProgress("near duplicates", count, "conversations", log) as progress:
        for row, line in enumerate(_lines(spool)):
            signatures[row] = signature(json.loads(line))
            if row % 500 == 0 or row == count - 1:
                progress.update(row + 1)
    found = near_duplicates(signatures, corpus.near_duplicates)
    originals, begins = set(found.values()), {}
    for row, line in enumerate(_lines(spool)) if found else ():
        if row in found or row in originals:
            conversation = json.loads(line)
            begins[row] = beginning(conversation)
            if row in found:
                tally = tallies[conversation["source"]]
                tally.records_kept -= 1
                detail = f"{begins[row]} is much like {begins[found[row]]}"
                tally.drop("near duplicate", id=conversation["id"], detail=detail)
    return found


def _lines(spool: IO[bytes]) -> Iterator[bytes]:
    spool.seek(0)
    with zstandard.ZstdDecompressor().stream_reader(spool, closefd=False) as stream:
        yield from io.BufferedReader(stream, 2**20)  # type: ignore[type-var]


@contextlib.contextmanager
def _open_packed(path: Path) -> Iterator[Any]:
    """A compressed file to write to; `path` appears when it is complete."""
    with (
        atomic_write(path) as temporary,
        temporary.open("wb") as raw,
        zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(
            raw, closefd=False
        ) as packed,
    ):
        yield packed


def _kept_share(tallies: list[Tally]) -> float:
    """Share of the records kept, without those in `NOT_LOST`."""
    lost = sum(n for t in tallies for reason, n in t.dropped.items() if reason not in NOT_LOST)
    kept = sum(t.records_kept for t in tallies)
    return kept / (kept + lost) if kept + lost else 0.0


def _sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total = sum(map(Counter, counts), Counter[str]())
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _check_kept(tallies: dict[str, Tally], corpus: Corpus) -> None:
    """Raise `InputError` when too few records are kept, or none of a source."""
    share = _kept_share(list(tallies.values()))
    problems = [
        f"source {name!r}: none of its {tally.records_in:,} records is usable"
        for name, tally in tallies.items()
        if tally.dropped and not tally.records_kept and tally.dropped.keys().isdisjoint(NOT_LOST)
    ]
    if corpus.min_kept_share == 0:
        problems = []
    if not any(tally.records_kept for tally in tallies.values()):
        problems = ["no record is usable"]
    elif share < corpus.min_kept_share:
        problems.insert(
            0,
            f"only {share:.1%} of the records are kept, the floor is {corpus.min_kept_share:.0%} "
            "(corpus.min_kept_share)",
        )
    if problems:
        raise InputError("; ".join(problems) + ". What became of them:\n" + _table(tallies))


def _table(tallies: dict[str, Tally]) -> str:
    """Dropped records by source and reason, each with its first example."""
    rows = []
    for name, tally in tallies.items():
        for reason, count in tally.dropped.items():
            example = dict(tally.examples[reason][0])
            detail = example.pop("detail", "")
            where = " ".join(example.values()) + (f" ({detail})" if detail else "")
            rows.append(f"  {name}: {reason}: {count:,}, such as {where}")
        for note, count in tally.changed.items():
            rows.append(f"  {name}: {note}: {count:,}")
    return "\n".join(rows)


def _print_summary(report: PromptsReport) -> None:
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(
        f"{report.records_kept:,} of {report.records_in:,} records kept: "
        f"{report.train:,} for training, {report.heldout:,} held out"
    )
    if rows := _table(report.sources):
        print(rows)
