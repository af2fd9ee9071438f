"""Text files line by line: JSON lines and plain text."""

import codecs
import io
import json
from collections.abc import Iterator

from aerie.corpus.records import CHUNK, MAX_RECORD, RawRecord

FIRST_LINE = 16 * 2**20
"""A longer first line, bytes, is assumed to be a JSON array or object on one line."""


class Lines:
    """Numbered lines without their ends (LF or CRLF), with lookahead."""

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
        """All lines from the first with text on; None for one longer than `MAX_RECORD`."""
        for number, line in self.ahead:
            if not line.endswith(b"\n"):  # longer than the lookahead, or the last line
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
        check of the record reports."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        yield decoder.decode(b"".join(line for _, line in self.ahead))
        while chunk := self.stream.read(CHUNK):
            yield decoder.decode(chunk)
        yield decoder.decode(b"", True)


def json_line(place: str, line: bytes) -> RawRecord:
    try:
        return RawRecord(place, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return RawRecord(place, None, _not_utf8(error))
    except json.JSONDecodeError as error:
        return RawRecord(place, None, f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return RawRecord(place, None, "JSON nested too deeply")
    except ValueError as error:
        return RawRecord(place, None, f"not JSON: {error}")


def text_line(place: str, line: bytes) -> RawRecord:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return RawRecord(place, None, _not_utf8(error))
    if "\0" in text:
        return RawRecord(place, None, "a NUL character in plain text (a binary file?)")
    if text.lstrip()[:1] in ("{", "[") and parses(line):
        return RawRecord(place, None, "a JSON value in a file that began as plain text")
    return RawRecord(place, text)


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"not UTF-8: byte 0x{byte:02x} at byte {error.start + 1} of the line"


def parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
