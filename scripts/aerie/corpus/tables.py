"""Tables: CSV and TSV, Parquet, Hugging Face datasets."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.corpus.lines import Lines
from aerie.corpus.records import MAX_RECORD, Meter, RawRecord


def read_table(lines: Lines, first: bytes, path: Path) -> Iterator[RawRecord]:
    csv.field_size_limit(MAX_RECORD)
    delimiter = "\t" if b"\t" in first else ";" if first.count(b";") > first.count(b",") else ","
    at = 0  # line on which the current row ends

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
            if at > before + 1:  # an open quote took in the lines after it
                raise InputError(
                    f"{path}: the row that starts at line {before + 1}: {error}; a quote that is "
                    "not closed? The rows after it cannot be told apart: repair it"
                ) from None
            yield RawRecord(f"line {at}", None, f"not a row of a table: {error}")
            continue
        if row is None:
            return
        if not names:
            names = [name.strip() for name in row]
            if len(set(names)) < len(names):
                raise InputError(f"{path}: line {at}: two columns have the same name: {names}")
        elif len(row) == len(names):
            yield RawRecord(f"line {before + 1}", dict(zip(names, row, strict=True)))
        elif row:
            fault = f"{len(row)} cells where the head of the table has {len(names)}"
            yield RawRecord(f"line {before + 1}", None, fault)


def read_parquet(path: Path, meter: Meter) -> Iterator[RawRecord]:
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
                yield RawRecord(f"record {number}", without_nulls(row))
            meter.done += path.stat().st_size * len(batch) // total
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        raise InputError(
            f"{path}: record {number + 1}: damaged Parquet file ({error}); fetch it again"
        ) from None


def without_nulls(value: Any) -> Any:
    """`value` without null fields: Arrow gives every row the fields of all rows."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def is_saved_dataset(place: str) -> bool:
    """Whether `save_to_disk` of `datasets` wrote this folder."""
    return any((Path(place) / name).is_file() for name in ("dataset_dict.json", "state.json"))


def read_dataset(place: str, split: str, subset: str | None) -> Iterator[RawRecord]:
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
                yield RawRecord(f"record {number}", without_nulls(row))
    except InputError:
        raise
    except Exception as error:  # `datasets` raises whatever its readers and the network raise
        text = " ".join(str(error).split())[:500]
        raise InputError(
            f"hf:{place}, split {split!r}, subset {subset!r}: cannot be loaded as a Hugging Face "
            f"dataset: {type(error).__name__}: {text}"
        ) from None
