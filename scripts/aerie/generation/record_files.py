"""Records in small files of compressed JSON lines, each whole or absent.

A killed job loses at most the last few records. Several runs may add to a folder at the same time.
"""

import contextlib
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from aerie.common.errors import InputError
from aerie.common.files import digest, read_json_lines, write_json_lines
from aerie.common.records import Record

FLUSH_RECORDS = 32
FLUSH_SECONDS = 20.0

R = TypeVar("R", bound=Record)


class RecordFiles(Generic[R]):
    """Records of the class `kind`, which have an `id`, in a folder."""

    def __init__(self, folder: Path, kind: type[R]):
        self.folder, self.kind = folder, kind
        self._known: set[Path] = set()
        self._fresh: list[R] = []
        self._flushed = time.monotonic()

    def load(self, wanted: Container[Any] | None = None) -> dict[Any, R]:
        """Records by id, all or those `wanted`. A damaged file is moved aside."""
        return self._read(sorted(self.folder.glob("*.jsonl.zst")), wanted)

    def load_new(self) -> dict[Any, R]:
        """All records in files that were added since, by others."""
        return self._read(sorted(set(self.folder.glob("*.jsonl.zst")) - self._known), None)

    def _read(self, files: Iterable[Path], wanted: Container[Any] | None) -> dict[Any, R]:
        found: dict[Any, R] = {}
        for path in files:
            self._known.add(path)
            try:
                # The checksum is at the end of the file: no record is used before all are read.
                records = [self.kind.parse(line, path) for line in read_json_lines(path)]
            except InputError:
                with contextlib.suppress(FileNotFoundError):  # another run was first
                    path.rename(path.with_suffix(".damaged"))
                continue
            for record in records:
                identity = record.id  # type: ignore[attr-defined]
                if wanted is not None and identity not in wanted:
                    continue
                if identity not in found or self.replaces(record):
                    found[identity] = record
        return found

    def replaces(self, record: R) -> bool:
        """Whether the record replaces an earlier one with the same id."""
        return True

    def add(self, record: R) -> None:
        self._fresh.append(record)
        late = time.monotonic() - self._flushed > FLUSH_SECONDS
        if late or len(self._fresh) >= FLUSH_RECORDS:
            self.flush()

    def flush(self) -> None:
        if self._fresh:
            name = digest([record.id for record in self._fresh])  # type: ignore[attr-defined]
            path = self.folder / f"{name}.jsonl.zst"
            write_json_lines(path, (record.as_json() for record in self._fresh))
            self._known.add(path)
        self._fresh = []
        self._flushed = time.monotonic()
