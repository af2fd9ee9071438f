"""Control tokens, and where a rendering really contains them."""

import re
from bisect import bisect_right
from typing import NamedTuple

from aerie.chat.tracing import Mark, Traced, plain_text


class Occurrence(NamedTuple):
    """A control token in a rendering: characters [start, end) and its id."""

    start: int
    end: int
    id: int


class Controls:
    """The tokens that steer a model.

    `special`: text to id of the tokens that no message may contain: the tokenizer's special
    tokens and those that the template writes around turns. `markup`: text to id of other added
    tokens that the template writes, such as `<think>` or `<tool_call>`; these may occur in an
    assistant's text.
    """

    def __init__(self, special: dict[str, int], markup: dict[str, int]):
        self.special, self.markup = special, markup
        self.ids = {**markup, **special}
        self.texts = {i: text for text, i in self.ids.items()}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find(self, text: Traced) -> tuple[list[Occurrence], bool]:
        """The control tokens of a rendering in order, and whether other text looks like one."""
        plain = plain_text(text)
        starts = [mark.start for mark in text.marks]
        found, lookalike, position = [], False, 0
        while match := self.pattern.search(plain, position):
            start, end = match.span()
            if all(
                mark.source.role == "assistant" and match[0] not in self.special
                for mark in overlapping(text.marks, starts, start, end)
            ):
                found.append(Occurrence(start, end, self.ids[match[0]]))
                position = end
            else:
                lookalike = True
                position = start + 1
        return found, lookalike

    def find_plain(self, text: str) -> list[Occurrence]:
        """The control tokens of a text that is all the template's."""
        return self.find(Traced(text))[0]


def overlapping(marks: tuple[Mark, ...], starts: list[int], start: int, end: int) -> list[Mark]:
    """Marks that share a character with [start, end); `starts` are the starts of the marks."""
    found = []
    i = bisect_right(starts, end - 1) - 1
    while i >= 0 and marks[i].end > start:
        found.append(marks[i])
        i -= 1
        while i >= 0 and marks[i].start == marks[i].end:
            i -= 1
    return found
