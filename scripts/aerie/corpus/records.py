"""Records as they are in a file, before a layout is found."""

from typing import Any, NamedTuple

MAX_RECORD = 64 * 2**20
"""Longest record, bytes; a longer one is a fault, which bounds the memory."""


CHUNK = 2**20
"""Bytes read at a time."""


class RawRecord(NamedTuple):
    """A record: `place` in its file, and `value`, any JSON value, or the `fault` that it has."""

    place: str
    value: Any = None
    fault: str | None = None


class Meter:
    """Counts the bytes read, for a progress bar."""

    def __init__(self) -> None:
        self.done = 0
