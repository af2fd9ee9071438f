"""Records: JSON objects that one program writes and another reads.

A record is a class that owns its reading and writing. `docs/formats.md` is generated from the
classes (`python scripts/describe_formats.py`), so a format is described in one place.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.common.errors import InputError
from aerie.common.files import read_json, write_json


class Record(BaseModel):
    """A JSON object in a file. Unknown keys are ignored, so that newer files can be read."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The record in `path`; an `InputError` names the file and the key when it is absent,
        damaged or lacks something."""
        return cls.parse(read_json(path), path)

    @classmethod
    def find(cls, path: Path | str) -> Self | None:
        """The record in `path`; None when there is none that can be read."""
        try:
            return cls.read(path)
        except InputError:
            return None

    @classmethod
    def parse(cls, value: Any, path: Path | str) -> Self:
        """The record in a parsed JSON value; `path` is named in errors."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"])) or "the file"
            raise InputError(
                f"{path}: {key}: {fault['msg']}; found {fault['input']!r:.80}. It was damaged or "
                "written by another version; delete it and run again"
            ) from None

    def write(self, path: Path | str) -> None:
        """Write the record as JSON; `path` is whole or unchanged."""
        write_json(path, self.as_json())

    def as_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return self.model_dump(mode="json")
