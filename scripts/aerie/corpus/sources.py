"""The sources of a corpus: their names, and checks before anything is read in full."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.config import Corpus, Source, load_config
from aerie.corpus.conversations import refuse, to_conversation
from aerie.corpus.files import expand
from aerie.corpus.reading import dataset_place, source_records
from aerie.corpus.report import Tally, without_surrogates
from aerie.corpus.unusable import Unusable

PROMPT_FILES = ("train.jsonl.zst", "heldout.jsonl.zst", "report.json")
"""What a run writes into its folder of prompts."""


def parse_source(text: str) -> Source:
    """A source given as an argument: a path, or a JSON object with the keys of `corpus.sources`.

    Raises `InputError` when it is neither.
    """
    given: Any = text
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"source {text[:200]!r}: not JSON ({error}); expected a path, or an object such as "
                '\'{"path": "data.csv", "column": "prompt", "limit": 1000}\''
            ) from None
    return load_config({"corpus": {"sources": [given]}}).corpus.sources[0]


def source_names(sources: list[Source]) -> list[str]:
    """A short, distinct name for each source: its own, or one from its path."""
    names: list[str] = []
    for source in sources:
        name = without_surrogates(source.name or _short(source.path))
        same = [f"{name}-{n}" for n in range(2, len(sources) + 2)]
        names.append(next(n for n in [name, *same] if n not in names))
    return names


def _short(path: str) -> str:
    if path.startswith("hf:"):
        return path[3:].rstrip("/")[-60:]
    parts = [p for p in Path(path).parts if not re.search(r"[*?\[]", p)]
    stem = (parts[-1] if parts else "prompts").split(".")[0]
    return stem[:60] or "prompts"


def new_tallies(sources: list[Source]) -> dict[str, Tally]:
    """A tally for each source by its name."""
    names = source_names(sources)
    return {n: Tally(path=without_surrogates(s.path)) for n, s in zip(names, sources, strict=True)}


def check_files(sources: list[Source], output: Path) -> int:
    """Bytes of all sources.

    Raises `InputError` when a source is missing, or is a file that the run writes into `output`,
    its folder of prompts.
    """
    own = {(output / name).resolve() for name in PROMPT_FILES}
    total = 0
    for source in sources:
        if dataset_place(source.path) is not None:
            continue
        files, skipped = expand(source.path)
        for file in files:
            if file.resolve() in own:
                raise InputError(f"{file}: a source of this run and its output; change one of them")
            total += file.stat().st_size
        if skipped:
            some = ", ".join(p.name for p in skipped[:5])
            print(f"{source.path}: not data files, skipped: {some}", file=sys.stderr)
    return total


def check_source(source: Source, corpus: Corpus) -> None:
    """Raise `InputError` when a source has no records, or no layout fits its first one."""
    for file, (place, value, fault) in source_records(source):
        try:
            if not fault:
                to_conversation(value, corpus.roles, source.column)
        except Unusable as error:
            if error.policy:
                refuse(error, corpus, Tally(path=source.path), file, place, value)
        except Exception:
            pass  # reported when the record is read
        return
    raise InputError(
        f"{source.path}: no records: the source is empty (or white space, or an empty list); "
        "check the path, or remove the source"
    )
