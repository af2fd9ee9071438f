"""Files in any common layout of bytes → records, each with its place in the file.

Compression (gzip of several members, zstandard), JSON (lines, array, one object, objects one
after another), CSV and TSV, Parquet, plain text and Hugging Face datasets are told apart by
content. What cannot be read is never skipped: a damaged record comes out with its fault, and a
file that cannot be read on (cut short, damaged array) raises `InputError`.
"""

import codecs
import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from aerie.common.errors import InputError

MAX_RECORD = 64 * 2**20
"""Longest record, bytes; a longer one is a fault, so that memory stays bounded."""
FIRST_LINE = 16 * 2**20
"""A first line longer than this, bytes, is taken for a JSON array or object on one line."""
CHUNK = 2**20
SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".gzip", ".zst", ".zstd")
NOT_RECORDS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SKIPPED = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""How a zstandard frame begins that holds no data, such as a table of places."""
FOREIGN = {
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"PK\x03\x04": "a zip file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"ARROW1": "an Arrow file",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself",
}


class Record(NamedTuple):
    """One record as it stands in the file: `value` is any JSON value, or `fault` says why not."""

    place: str
    value: Any = None
    fault: str | None = None


class Meter:
    """Counts the bytes read, for a progress bar."""

    def __init__(self) -> None:
        self.done = 0


def expand(pattern: str) -> tuple[list[Path], list[Path]]:
    """Files meant by a file name, folder or glob pattern, sorted; and files passed over.

    In a folder only files with a data file's name are taken (`SUFFIXES`, also compressed).
    Raises `InputError` when there is nothing.
    """
    path = Path(pattern)
    if not pattern.strip():
        raise InputError(f"source {pattern!r}: no path; expected a file, a folder or a pattern")
    try:
        if path.is_file():
            return [path], []
        if path.is_dir():
            inside = _files_in(path)
            files = [p for p in inside if _is_data(p)]
            if not files:
                names = ", ".join(SUFFIXES)
                raise InputError(
                    f"{pattern}: this folder has no data file ({names}, also .gz, .zst)"
                )
            for file in files:
                _check_file(file)
            return files, [p for p in inside if not _is_data(p)]
        found = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
        files = [p for p in found if not p.is_dir()]
    except (OSError, ValueError) as error:
        raise InputError(f"{pattern[:200]!r}: not usable as a path ({error})") from None
    for file in files:
        _check_file(file)
    if not files:
        if glob.has_magic(pattern):
            raise InputError(f"{pattern}: no file matches this pattern")
        if path.exists():
            raise InputError(f"{pattern}: neither a file nor a folder")
        raise InputError(
            f"{pattern}: no such file or folder; check the path (a Hugging Face dataset is "
            "given as hf:OWNER/NAME)"
        )
    return files, []


def _files_in(folder: Path) -> list[Path]:
    """All that is no folder and not hidden, sorted; links to folders are followed, once each."""
    found, seen = [], set()

    def stop(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = () if real in seen else sorted(f for f in folders if not f.startswith("."))
        if real not in seen:
            found += [Path(place, name) for name in names if not name.startswith(".")]
        seen.add(real)
    return sorted(found)


def _check_file(path: Path) -> None:
    """`InputError` for what a name stands for but cannot be read as a file."""
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: a link to nothing; fetch the file, or take the link away")
    if not path.is_file():
        raise InputError(f"{path}: neither a file nor a folder")


def _is_data(path: Path) -> bool:
    return _data_name(path).endswith(SUFFIXES) and path.name not in NOT_RECORDS


def _data_name(path: Path) -> str:
    """File name in small letters, without the ending of a compressed file."""
    name = path.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return name


def read_records(
    path: Path, column: str | None = None, meter: Meter | None = None
) -> Iterator[Record]:
    """Records of one file; raises `InputError` when the file cannot be read to its end."""
    meter = meter or Meter()
    try:
        with _CountedFile(path, meter) as raw:
            magic = raw.read(32) or b""
            raw.seek(0)
            if magic.startswith(b"PAR1"):
                yield from _parquet(path, meter)
                return
            stream: Any = io.BufferedReader(raw, CHUNK)
            if magic.startswith(b"\x1f\x8b"):
                stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), CHUNK)
            elif magic.startswith(zstandard.FRAME_HEADER) or SKIPPED.match(magic):
                stream = io.BufferedReader(_Zstandard(stream), CHUNK)
            yield from _read(_Lines(stream), path, column)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise InputError(
            f"{path}: the compressed file is damaged or cut short ({error}); fetch it again"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


class _CountedFile(io.FileIO):
    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path)
        self.meter = meter

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.meter.done += count or 0
        return count


class _Zstandard(io.RawIOBase):
    """Decompressed bytes of all frames; a last frame without its end is an error.

    (`zstandard`'s own stream reader ends quietly there.)
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.frame: Any = None
        self.packed = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            packed = self.packed or self.source.read(2**17)
            if not packed:
                if self.frame is not None:
                    raise EOFError("it ends within a zstandard frame")
                return 0
            if self.frame is None:
                self.frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            self.ready = memoryview(self.frame.decompress(packed))
            self.packed = b""
            if self.frame.eof:
                self.packed, self.frame = self.frame.unused_data, None
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count


class _Lines:
    """Numbered lines without their ends (LF or CRLF), with a look ahead."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.stream, self.number = stream, 0
        self.ahead: list[tuple[int, bytes]] = []

    def look(self) -> bytes:
        """The next line with text, or its first `FIRST_LINE` bytes; b"" at the end."""
        while line := self.stream.readline(FIRST_LINE):
            self.number += line.endswith(b"\n")
            if self.number <= 1 and not self.ahead:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                self.ahead.append((self.number + (not line.endswith(b"\n")), line))
                return line.strip()
        return b""

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        """All lines from the first with text on; None stands for one beyond `MAX_RECORD`."""
        for number, line in self.ahead:
            if not line.endswith(b"\n"):  # longer than a look, or the last
                self.number = number
                line += self.stream.readline(MAX_RECORD - len(line))
            yield number, self._whole(line)
        while line := self.stream.readline(MAX_RECORD):
            self.number += 1
            yield self.number, self._whole(line)

    def _whole(self, line: bytes) -> bytes | None:
        if len(line) < MAX_RECORD or line.endswith(b"\n"):
            return line.rstrip(b"\r\n")
        while line and not line.endswith(b"\n"):
            line = self.stream.readline(MAX_RECORD)
        return None

    def chunks(self) -> Iterator[str]:
        """The same as text; a byte that is not UTF-8 becomes half a surrogate pair, which the
        record's own check reports."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        yield decoder.decode(b"".join(line for _, line in self.ahead))
        while chunk := self.stream.read(CHUNK):
            yield decoder.decode(chunk)
        yield decoder.decode(b"", True)


def _read(lines: _Lines, path: Path, column: str | None) -> Iterator[Record]:
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
        yield from _values(lines.chunks(), path)
    elif kind == "table":
        yield from _table(lines, first, path)
    else:
        read = _json_line if kind == "lines" else _text_line
        for number, line in lines:
            if line is None:
                yield Record(f"line {number}", None, f"longer than {MAX_RECORD} bytes")
            elif line and not line.isspace():
                yield read(f"line {number}", line)


def _kind(first: bytes, lines: _Lines, path: Path, column: str | None) -> str:
    """`lines` of JSON, `values` (JSON not line by line), `table` or plain `text`.

    Text that starts like JSON is JSON, also when it is damaged: a prompt that starts with a
    bracket is rarer than a broken file, and an error is better than a wrong prompt.
    """
    start = first[:1]
    if start == b"{":
        if len(first) >= FIRST_LINE - 1 or _several(first):
            return "values"
        closed = first.endswith(b"}") and first.count(b"{") == first.count(b"}")
        return "lines" if closed or _parses(first) else "values"
    if start == b"[":  # one array of records, or a list a line?
        one_line = len(first) < FIRST_LINE - 1 and _parses(first)
        return "lines" if one_line and lines.look() else "values"
    named_json = _data_name(path).endswith((".jsonl", ".ndjson", ".json"))
    if (start == b'"' or named_json) and _parses(first):
        return "lines"
    if _data_name(path).endswith((".csv", ".tsv")):
        return "table"
    cells = re.split(r"[,\t;]", first.decode("utf-8", "replace"))
    names = {cell.strip(' "') for cell in cells}
    if column is not None and column in names:
        return "table"
    return "table" if len(names) > 1 and names & TABLE_HEADS else "text"


TABLE_HEADS = {"prompt", "instruction", "question", "query", "response"}
TABLE_HEADS |= {"messages", "conversations"}
"""Names that mark the first line of a text file as the head of a table."""


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _several(line: bytes) -> bool:
    """Whether the line is a JSON object with another one right after it."""
    text = line.decode("utf-8", "surrogateescape")
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return False
    return text[end:].lstrip().startswith("{")


def _json_line(place: str, line: bytes) -> Record:
    try:
        return Record(place, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Record(place, None, _not_utf8(error))
    except json.JSONDecodeError as error:
        return Record(place, None, f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return Record(place, None, "JSON nested too deeply")
    except ValueError as error:
        return Record(place, None, f"not JSON: {error}")


def _text_line(place: str, line: bytes) -> Record:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return Record(place, None, _not_utf8(error))
    if "\0" in text:
        return Record(place, None, "a NUL character in plain text (a binary file?)")
    if text.lstrip()[:1] in ("{", "[") and _parses(line):
        return Record(place, None, "a JSON value in a file that began as plain text")
    return Record(place, text)


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"not UTF-8: byte 0x{byte:02x} at byte {error.start + 1} of the line"


class _Scanner:
    """JSON values out of chunks of text, with no more of the text in memory than needed."""

    def __init__(self, chunks: Iterator[str], path: Path) -> None:
        self.chunks, self.path = chunks, path
        self.text, self.at, self.count = "", 0, 0
        self.decode = json.JSONDecoder().raw_decode
        self.space = re.compile(r"[ \t\r\n]*")

    def more(self) -> bool:
        want = max(CHUNK, len(self.text) - self.at)
        parts = [self.text[self.at :]]
        found = 0
        for chunk in self.chunks:
            parts.append(chunk)
            found += len(chunk)
            if found >= want:
                break
        self.text, self.at = "".join(parts), 0
        return found > 0

    def peek(self) -> str:
        """Next character that is not white space, or '' at the end."""
        while True:
            self.at = self.space.match(self.text, self.at).end()
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self) -> Any:
        self.count += 1
        while True:
            try:
                value, self.at = self.decode(self.text, self.at)
                return value
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self.text) - 16
                cut = near_end or error.msg.startswith("Unterminated string")
                if len(self.text) - self.at > MAX_RECORD:
                    self.fail(f"longer than {MAX_RECORD} characters, or not closed")
                shown = self.text[error.pos : error.pos + 30]
                if not (cut and self.more()):
                    if not shown.strip() or error.msg.startswith("Unterminated"):
                        self.fail("not JSON: the file ends within it")
                    self.fail(f"not JSON: {error.msg}, at {shown!r}")
            except RecursionError:
                self.fail("JSON nested too deeply")
            except ValueError as error:
                self.fail(f"not JSON: {error}")

    def fail(self, what: str) -> None:
        raise InputError(
            f"{self.path}: record {self.count}: {what}; the rest of the file cannot be told "
            "apart after it: repair it, or write one record a line (JSON lines)"
        )


def _values(chunks: Iterator[str], path: Path) -> Iterator[Record]:
    """Values one after another; the elements of an array are records, unless they are turns."""
    scanner = _Scanner(chunks, path)
    number = 0
    while start := scanner.peek():
        if start != "[":
            number += 1
            yield Record(f"record {number}", scanner.value())
            continue
        turns: list[Any] = []
        for value in _elements(scanner):
            if turns or (not number and is_turn(value)):
                turns.append(value)
                continue
            number += 1
            yield Record(f"record {number}", value)
        if turns:
            number += 1
            yield Record(f"record {number}", turns)


def _elements(scanner: _Scanner) -> Iterator[Any]:
    scanner.at += 1
    if scanner.peek() == "]":
        scanner.at += 1
        return
    while True:
        if not scanner.peek():
            scanner.fail("the file ends before the array does (cut short?)")
        yield scanner.value()
        mark = scanner.peek()
        scanner.at += 1
        if mark == "]":
            return
        if mark != ",":
            found = repr(mark) if mark else "the end of the file (cut short?)"
            scanner.fail(f"expected ',' or ']' after it, found {found}")


def is_turn(value: Any) -> bool:
    """Whether a JSON value is one turn of a conversation and not a record of its own."""
    return isinstance(value, dict) and (
        ("role" in value and ("content" in value or "tool_calls" in value))
        or ("from" in value and "value" in value)
    )


def _table(lines: _Lines, first: bytes, path: Path) -> Iterator[Record]:
    csv.field_size_limit(MAX_RECORD)
    delimiter = "\t" if b"\t" in first else ";" if first.count(b";") > first.count(b",") else ","
    at = 0  # line that the row being read ends on

    def text() -> Iterator[str]:
        nonlocal at
        for number, line in lines:
            if line is None:
                raise InputError(f"{path}: line {number}: longer than {MAX_RECORD} bytes")
            at = number
            yield line.decode("utf-8", "surrogateescape") + "\n"

    reader = csv.reader(text(), delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        before = at
        try:
            row = next(reader, None)
        except csv.Error as error:
            if at > before + 1:  # an open quote swallowed the lines after it
                raise InputError(
                    f"{path}: the row that starts at line {before + 1}: {error}; a quote that is "
                    "not closed? The rows after it cannot be told apart: repair it"
                ) from None
            yield Record(f"line {at}", None, f"not a row of a table: {error}")
            continue
        if row is None:
            return
        if not names:
            names = [name.strip() for name in row]
            if len(set(names)) < len(names):
                raise InputError(f"{path}: line {at}: two columns have the same name: {names}")
        elif len(row) == len(names):
            yield Record(f"line {before + 1}", dict(zip(names, row, strict=True)))
        elif row:
            fault = f"{len(row)} cells where the head of the table has {len(names)}"
            yield Record(f"line {before + 1}", None, fault)


def _parquet(path: Path, meter: Meter) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
        total = max(1, file.metadata.num_rows)
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise InputError(f"{path}: two columns have the same name: {names}")
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield Record(f"record {number}", without_nulls(row))
            meter.done += path.stat().st_size * len(batch) // total
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        raise InputError(
            f"{path}: record {number + 1}: damaged Parquet file ({error}); fetch it again"
        ) from None


def without_nulls(value: Any) -> Any:
    """`value` without empty fields: Arrow gives every row the fields of all rows."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def is_saved_dataset(place: str) -> bool:
    """Whether this is a folder that `save_to_disk` of `datasets` wrote."""
    return any((Path(place) / name).is_file() for name in ("dataset_dict.json", "state.json"))


def read_dataset(place: str, split: str, subset: str | None) -> Iterator[Record]:
    """Records of a Hugging Face dataset, by id or folder (also one that `save_to_disk` wrote).

    Raises `InputError` with the message of `datasets` when it cannot be loaded.
    """
    try:
        import datasets
    except ImportError:
        raise InputError(f"hf:{place}: needs the package `datasets`; install it") from None
    datasets.disable_progress_bars()
    try:
        if is_saved_dataset(place):
            data = datasets.load_from_disk(place)
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise InputError(f"hf:{place}: no split {split!r}; it has {', '.join(data)}")
                data = data[split]
        else:
            data = datasets.load_dataset(place, subset, split=split)
        number = 0
        for table in data.with_format("arrow").iter(batch_size=256):
            for row in table.to_pylist():
                number += 1
                yield Record(f"record {number}", without_nulls(row))
    except InputError:
        raise
    except Exception as error:  # `datasets` passes on whatever its readers and the network raise
        text = " ".join(str(error).split())[:500]
        raise InputError(
            f"hf:{place}, split {split!r}, subset {subset!r}: cannot be loaded as a Hugging Face "
            f"dataset: {type(error).__name__}: {text}"
        ) from None
