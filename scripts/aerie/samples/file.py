"""The file of tokenized samples, `samples/samples.parquet`."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from aerie.common.errors import InputError
from aerie.common.files import atomic_write

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "record": pa.string(),
        "source": pa.string(),
        "split": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "last_turn": pa.int32(),
        "next_token": pa.int32(),
    }
)


@dataclass
class TokenizedSample:
    """One sample of T tokens.

    `input_ids` [T]; `loss_mask` [T], True where the verifier wrote the token; `last_turn`:
    position of the last answer's first token; `next_token`: the token after the last of
    `input_ids`, -1 if unknown. A generated answer's last token is `next_token` and not in
    `input_ids`: the verifier never read it, so it has no hidden state.
    """

    id: str
    record: str
    source: str
    split: str
    input_ids: list[int]
    loss_mask: list[bool]
    last_turn: int
    next_token: int


def write_samples(path: Path, samples: Iterable[TokenizedSample]) -> None:
    table = pa.Table.from_pylist([vars(s) for s in samples], schema=SCHEMA)
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_samples(path: Path) -> dict[str, TokenizedSample]:
    """Samples by id, in the order of the file; `InputError` if the file is damaged."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not readable as Parquet ({error})") from error
    if missing := set(SCHEMA.names) - set(table.column_names):
        raise InputError(
            f"{path}: found the columns {table.column_names}, expected also {sorted(missing)}; "
            "delete the file and run again"
        )
    samples: dict[str, TokenizedSample] = {}
    number: dict[int, int] = {}  # one object for each id, so that a token takes 8 bytes, not 36
    for batch in table.select(SCHEMA.names).to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            row["input_ids"] = [number.setdefault(i, i) for i in row["input_ids"]]
            samples[row["id"]] = TokenizedSample(**row)
    return samples
