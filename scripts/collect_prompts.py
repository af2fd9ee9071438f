#!/usr/bin/env python3
"""Collect prompts or conversations in any common layout, divided into training and held-out.

Writes OUTPUT/train.jsonl.zst, OUTPUT/heldout.jsonl.zst and OUTPUT/report.json. Every record that
goes in is in one of the two files or in a count with a reason. docs/corpus.md has the layouts,
the rules and the report's format.
"""

import argparse
import array
import contextlib
import io
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard

from aerie.common.cli import parser
from aerie.common.errors import InputError
from aerie.common.files import atomic_write, write_json
from aerie.common.progress import JobProgress
from aerie.common.text import beginning
from aerie.config import Corpus, Source, load_config
from aerie.corpus.cleaning import (
    MB,
    PERMUTATIONS,
    Contamination,
    cleaned,
    heldout_border,
    near_duplicates,
    prompt_hash,
    signature,
)
from aerie.corpus.layouts import (
    PROMPT_FILES,
    Tally,
    check_files,
    check_source,
    conversations,
    new_tallies,
    parse_source,
    source_names,
)
from aerie.corpus.reading import Meter

NOT_LOST = ("duplicate", "near duplicate", "outside the source's weight")
"""Reasons that do not count against the floor: the text is kept elsewhere, or was not asked for."""


def collect(
    corpus: Corpus,
    mode: str,
    output: Path,
    decontaminate: list[Source],
    progress_log: Path | None = None,
) -> dict[str, Any]:
    """Read, clean, divide and write; returns the report that was written.

    Memory holds a few hashes a record, not the records. Raises `InputError`, and then writes
    nothing.
    """
    total = check_files(corpus.sources, output)
    for source in [*corpus.sources, *decontaminate]:
        check_source(source, corpus)
    tallies, meter = new_tallies(corpus.sources), Meter()
    evaluation, sets = evaluation_prompts(decontaminate, corpus)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output) as spool:
        hashes = array.array("Q")
        with (
            JobProgress("collecting", total // MB, "MB", progress_log) as progress,
            zstandard.ZstdCompressor(level=1).stream_writer(spool, closefd=False) as packed,
        ):
            for found in cleaned(corpus, mode, tallies, meter, evaluation, sets, progress):
                hashes.append(prompt_hash(found.record))
                packed.write(found.line + b"\n")
        remove = similar(corpus, spool, len(hashes), tallies, progress_log)
        check_kept(tallies, corpus)
        kept = array.array("Q", (h for row, h in enumerate(hashes) if row not in remove))
        border, warning = heldout_border(kept, corpus.heldout_share)
        # A report stands beside files that belong to it, or there is none.
        (output / PROMPT_FILES[2]).unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            sides = [stack.enter_context(sink(output / name)) for name in PROMPT_FILES[:2]]
            counts = [0, 0]
            for row, line in enumerate(lines(spool)):
                if row not in remove:
                    side = int(hashes[row] < border)
                    sides[side].write(line)
                    counts[side] += 1
    report = {
        "mode": mode,
        "records_in": sum(t.records_in for t in tallies.values()),
        "records_kept": sum(counts),
        "kept_share": round(kept_share(list(tallies.values())), 6),
        "train": counts[0],
        "heldout": counts[1],
        "heldout_share": corpus.heldout_share,
        "dropped": summed(t.dropped for t in tallies.values()),
        "changed": summed(t.changed for t in tallies.values()),
        "warnings": [warning] if warning else [],
        "evaluation_sets": sets,
        "sources": {name: tally.report() for name, tally in tallies.items()},
    }
    write_json(output / PROMPT_FILES[2], report)
    return report


def evaluation_prompts(
    sources: list[Source], corpus: Corpus
) -> tuple[Contamination | None, dict[str, dict[str, int]]]:
    """What to decontaminate against, and the number of prompts a set; a bad record stops."""
    if not sources:
        return None, {}
    strict = corpus.model_copy(update={"on_bad_record": "stop", "on_unknown_role": "stop"})
    found, sets = Contamination(corpus.decontamination_words), {}
    for source, name in zip(sources, source_names(sources), strict=True):
        tally = Tally(source.path)
        for conversation in conversations(source, name, strict, "generate", tally):
            found.add(name, conversation.record)
            tally.records_kept += 1
        sets[name] = {"prompts": tally.records_kept, "records_dropped": 0}
    return found, sets


def similar(
    corpus: Corpus, spool: IO[bytes], count: int, tallies: dict[str, Tally], log: Path | None
) -> dict[int, int]:
    """Near duplicates among the spooled records: row → earlier row; counted in the tallies."""
    if corpus.near_duplicates is None or count < corpus.near_duplicates_from:
        return {}
    signatures = np.empty((count, PERMUTATIONS), np.uint32)
    with JobProgress("near duplicates", count, "conversations", log) as progress:
        for row, line in enumerate(lines(spool)):
            signatures[row] = signature(json.loads(line))
            if row % 500 == 0 or row == count - 1:
                progress.update(row + 1)
    found = near_duplicates(signatures, corpus.near_duplicates)
    first_ones, begins = set(found.values()), {}
    for row, line in enumerate(lines(spool)) if found else ():
        if row in found or row in first_ones:
            record = json.loads(line)
            begins[row] = beginning(record)
            if row in found:
                tally = tallies[record["source"]]
                tally.records_kept -= 1
                detail = f"{begins[row]} is much like {begins[found[row]]}"
                tally.drop("near duplicate", id=record["id"], detail=detail)
    return found


def lines(spool: IO[bytes]) -> Iterator[bytes]:
    spool.seek(0)
    with zstandard.ZstdDecompressor().stream_reader(spool, closefd=False) as stream:
        yield from io.BufferedReader(stream, 2**20)


@contextlib.contextmanager
def sink(path: Path) -> Iterator[Any]:
    """A compressed file to write to that gets its name when it is whole."""
    with (
        atomic_write(path) as temporary,
        temporary.open("wb") as raw,
        zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(
            raw, closefd=False
        ) as packed,
    ):
        yield packed


def kept_share(tallies: list[Tally]) -> float:
    """Records kept of those that could have been; duplicates are kept once and not lost."""
    lost = sum(n for t in tallies for reason, n in t.dropped.items() if reason not in NOT_LOST)
    kept = sum(t.records_kept for t in tallies)
    return kept / (kept + lost) if kept + lost else 0.0


def summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total = sum(map(Counter, counts), Counter())
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def check_kept(tallies: dict[str, Tally], corpus: Corpus) -> None:
    """`InputError` when too little is kept of the whole, or nothing of a source."""
    share = kept_share(list(tallies.values()))
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
            "(corpus.min_kept_share, --min-kept-share)",
        )
    if problems:
        raise InputError(
            "; ".join(problems)
            + ". What became of them:\n"
            + table({n: t.report() for n, t in tallies.items()})
        )


def table(sources: dict[str, dict[str, Any]]) -> str:
    """Dropped records by source and reason, each with its first example."""
    rows = []
    for name, source in sources.items():
        for reason, count in source["dropped"].items():
            example = dict(source["examples"][reason][0])
            detail = example.pop("detail", "")
            where = " ".join(example.values()) + (f" ({detail})" if detail else "")
            rows.append(f"  {name}: {reason}: {count:,}, such as {where}")
        for note, count in source["changed"].items():
            rows.append(f"  {name}: {note}: {count:,}")
    return "\n".join(rows)


def parse_role(text: str) -> tuple[str, str]:
    name, _, role = text.rpartition("=")
    if not name:
        raise InputError(f"--role {text!r}: expected NAME=ROLE, such as my-model-7b=assistant")
    return name, role


def read_arguments() -> argparse.Namespace:
    """The arguments, with `config` (checked) and `evaluation` (sources) made of them."""
    arguments = parser(__doc__)
    arguments.formatter_class = argparse.RawDescriptionHelpFormatter
    add = arguments.add_argument
    keys = ", ".join(Source.model_fields)
    text = f"file, folder, glob pattern or hf:DATASET; or a JSON object with {keys}"
    add("--source", action="append", required=True, help=text)
    add("--output", type=Path, required=True, help="folder for the three files")
    add("--mode", help="generate (the verifier will answer) or keep (the answers given)")
    add("--decontaminate", action="append", default=[], metavar="FILE", help="evaluation prompts")
    add("--role", action="append", default=[], metavar="NAME=ROLE", help="a further role name")
    add("--progress-log", type=Path, metavar="FILE", help="file for progress as JSON lines")
    options = [n for n in Corpus.model_fields if n not in ("sources", "roles", "decontaminate")]
    for name in options:
        field = Corpus.model_fields[name]
        text = f"{' '.join((field.description or '').split())} Default: {field.default}."
        add(f"--{name.replace('_', '-')}", metavar="VALUE", help=text.replace("%", "%%"))
    given = arguments.parse_args()
    corpus = {name: getattr(given, name) for name in options if getattr(given, name) is not None}
    corpus["sources"] = [parse_source(text) for text in given.source]
    corpus["roles"] = dict(parse_role(text) for text in given.role)
    generation = {"mode": given.mode} if given.mode is not None else {}
    given.config = load_config({"corpus": corpus, "generation": generation})
    sets = [parse_source(text) for text in given.decontaminate]
    given.evaluation = load_config({"corpus": {"sources": sets}}).corpus.sources if sets else []
    return given


def main() -> int:
    try:
        given = read_arguments()
        corpus, mode = given.config.corpus, given.config.generation.mode
        report = collect(corpus, mode, given.output, given.evaluation, given.progress_log)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}, line {at.lineno}"
        print(
            f"error: unexpected {type(error).__name__}: {error} ({where}). This is a fault of the "
            "program, please report it with the record; nothing was written",
            file=sys.stderr,
        )
        return 1
    for warning in report["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    print(
        f"{report['records_kept']:,} of {report['records_in']:,} records kept: "
        f"{report['train']:,} for training, {report['heldout']:,} held out"
    )
    if rows := table(report["sources"]):
        print(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
