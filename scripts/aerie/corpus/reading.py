"""Sources to records, each with its place in the file.

Compression (gzip with several members, zstandard), JSON (lines, an array, one object, objects one
after another), CSV and TSV, Parquet, plain text and Hugging Face datasets are told apart by
content. Nothing unreadable is skipped: a damaged record comes out with its fault, and a file that
cannot be read to its end (cut short, damaged array) raises `InputError`.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from aerie.common.errors import InputError
from aerie.config import Source
from aerie.corpus.compression import CountedFile, decompressed
from aerie.corpus.files import data_name, expand
from aerie.corpus.json_values import read_values
from aerie.corpus.lines import FIRST_LINE, Lines, json_line, parses, text_line
from aerie.corpus.records import MAX_RECORD, Meter, RawRecord
from aerie.corpus.tables import is_saved_dataset, read_dataset, read_parquet, read_table


def dataset_place(path: str) -> str | None:
    """Id or folder of a Hugging Face dataset; None for other paths."""
    if path.startswith("hf:"):
        return path[3:]
    return path if is_saved_dataset(path) else None


def source_records(source: Source, meter: Meter | None = None) -> Iterator[tuple[str, RawRecord]]:
    """Every record of a source, with the name of its file."""
    place = dataset_place(source.path)
    if place is not None:
        for record in read_dataset(place, source.split, source.subset):
            yield source.path, record
        return
    for file in expand(source.path)[0]:
        for record in read_records(file, source.column, meter):
            yield str(file), record


FOREIGN = {
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"PK\x03\x04": "a zip file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"ARROW1": "an Arrow file",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself",
}


def read_records(
    path: Path, column: str | None = None, meter: Meter | None = None
) -> Iterator[RawRecord]:
    """Records of one file; raises `InputError` when the file cannot be read to its end.

    `column`: the key that holds the prompt; a text file with it in its first line is a table.
    """
    meter = meter or Meter()
    try:
        with CountedFile(path, meter) as raw:
            magic = raw.read(32) or b""
            raw.seek(0)
            if magic.startswith(b"PAR1"):
                yield from read_parquet(path, meter)
                return
            yield from _read(Lines(decompressed(raw, magic)), path, column)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise InputError(
            f"{path}: the compressed file is damaged or cut short ({error}); fetch it again"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def _read(lines: Lines, path: Path, column: str | None) -> Iterator[RawRecord]:
    first = lines.look()
    for magic, name in FOREIGN.items():
        if first.startswith(magic):
            raise InputError(
                f"{path}: this is {name}; expected JSON, CSV, Parquet or text in UTF-8, plain, "
                "gzip or zstandard"
            )
    if not first:
        return
    kind = _kind(first, lines, path, column)
    if kind == "values":
        yield from read_values(lines.chunks(), path)
    elif kind == "table":
        yield from read_table(lines, first, path)
    else:
        read = json_line if kind == "lines" else text_line
        for number, line in lines:
            if line is None:
                yield RawRecord(f"line {number}", None, f"longer than {MAX_RECORD} bytes")
            elif line and not line.isspace():
                yield read(f"line {number}", line)


TABLE_HEADS = {
    "prompt", "instruction", "question", "query", "response", "messages", "conversations"
}  # fmt: skip
"""Names that make the first line of a text file the head of a table."""


def _kind(first: bytes, lines: Lines, path: Path, column: str | None) -> str:
    """`lines` of JSON, `values` (JSON not line by line), `table` or plain `text`.

    Text that starts like JSON is JSON, even when it is damaged: a prompt that starts with a
    bracket is rarer than a broken file, and an error is better than a wrong prompt.
    """
    start = first[:1]
    if start == b"{":
        if len(first) >= FIRST_LINE - 1 or _several(first):
            return "values"
        closed = first.endswith(b"}") and first.count(b"{") == first.count(b"}")
        return "lines" if closed or parses(first) else "values"
    if start == b"[":  # one array of records, or a list on each line?
        one_line = len(first) < FIRST_LINE - 1 and parses(first)
        return "lines" if one_line and lines.look() else "values"
    named_json = data_name(path).endswith((".jsonl", ".ndjson", ".json"))
    if (start == b'"' or named_json) and parses(first):
        return "lines"
    if data_name(path).endswith((".csv", ".tsv")):
        return "table"
    cells = re.split(r"[,\t;]", first.decode("utf-8", "replace"))
    names = {cell.strip(' "') for cell in cells}
    if column is not None and column in names:
        return "table"
    return "table" if len(names) > 1 and names & TABLE_HEADS else "text"


def _several(line: bytes) -> bool:
    """Whether the line is a JSON object with another one after it."""
    text = line.decode("utf-8", "surrogateescape")
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return False
    return text[end:].lstrip().startswith("{")
