"""JSON that is not line by line: arrays, objects over several lines or one after another."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from aerie.common.errors import InputError
from aerie.corpus.records import CHUNK, MAX_RECORD, RawRecord
from aerie.corpus.turns import is_turn


class _Scanner:
    """JSON values from chunks of text, with little of the text in memory."""

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
        """The next character that is not white space, or '' at the end."""
        while True:
            space = self.space.match(self.text, self.at)
            assert space is not None  # the pattern matches nothing, too
            self.at = space.end()
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

    def fail(self, what: str) -> NoReturn:
        raise InputError(
            f"{self.path}: record {self.count}: {what}; the rest of the file cannot be told "
            "apart after it: repair it, or write one record a line (JSON lines)"
        )


def read_values(chunks: Iterator[str], path: Path) -> Iterator[RawRecord]:
    """JSON values one after another; an array's elements are records, unless they are turns."""
    scanner = _Scanner(chunks, path)
    number = 0
    while start := scanner.peek():
        if start != "[":
            number += 1
            yield RawRecord(f"record {number}", scanner.value())
            continue
        turns: list[Any] = []
        for value in _elements(scanner):
            if turns or (not number and is_turn(value)):
                turns.append(value)
                continue
            number += 1
            yield RawRecord(f"record {number}", value)
        if turns:
            number += 1
            yield RawRecord(f"record {number}", turns)


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
