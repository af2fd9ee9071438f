"""Loss masks: what the assistant wrote, and the token that ends its turn.

The edges are known by character (`rendering.py`), then by token (`encoding.py`), and are checked
by decoding on every call. See `docs/loss_masks.md`.
"""

import re
from typing import Any, NamedTuple

from aerie.chat.codec import Codec
from aerie.chat.encoding import Encoded
from aerie.chat.messages import Message
from aerie.chat.probing import TurnMarkup
from aerie.chat.rendering import RenderedTurn, Renderer, rendered_turns
from aerie.chat.tracing import Mark, Traced, plain_text
from aerie.chat.unverified import Unverified


class Masked(NamedTuple):
    """A conversation as tokens."""

    input_ids: list[int]  # [length]
    loss_mask: list[bool]  # [length], True where the assistant wrote the token
    last_turn: int  # index of the first supervised token of the last assistant turn


class Span(NamedTuple):
    """Supervised characters [start, end) of a rendering.

    `opening`: where the generation prompt ends, if known. The assistant may have written the
    blanks from there to `start`, where a token joins them to its text.
    """

    start: int
    end: int
    opening: int | None
    message: int


class Masker:
    """Finds the supervised part of a conversation."""

    def __init__(self, renderer: Renderer, codec: Codec, markup: TurnMarkup):
        self.renderer, self.codec, self.markup = renderer, codec, markup

    def mask(
        self, messages: list[Message], tools: list[Any] | None, supervise_reasoning: bool
    ) -> Masked:
        """See `ChatTemplate.mask`."""
        text = self.renderer.render(messages, tools, False)
        spans = self._spans(text, messages, tools, supervise_reasoning)
        if not spans:
            raise Unverified("no assistant text in the rendering")
        cuts: set[int] = set()
        for _ in range(4):
            encoded = self.codec.encode_with_bos(text, cuts)
            spans, more = self._align(text, spans, encoded)
            if not more:
                break
            cuts |= more
        else:
            raise Unverified("a token reaches across the edge of a turn")
        mask = [False] * len(encoded.ids)
        firsts: list[tuple[int, int]] = []
        place = 0
        for span in spans:
            while place < len(mask) and encoded.spans[place][1] <= span.start:
                place += 1
            first = place
            while place < len(mask) and encoded.spans[place][0] < span.end:
                mask[place] = True
                place += 1
            self._check(plain_text(text), span, encoded.ids, first, place)
            if place > first:
                firsts.append((span.message, first))
        if not firsts:
            raise Unverified("no assistant text in the rendering")
        last_message = firsts[-1][0]
        return Masked(encoded.ids, mask, next(f for m, f in firsts if m == last_message))

    def _align(
        self, text: Traced, spans: list[Span], encoded: Encoded
    ) -> tuple[list[Span], set[int]]:
        """Move a span's start to its token's start where the blanks before it are the assistant's.

        Also returns the positions where a token reaches across an edge and must be cut.
        """
        aligned: list[Span] = []
        cuts: set[int] = set()
        places = encoded.spans
        plain = plain_text(text)
        place = 0
        for span in spans:
            start, end, opening, message = span
            while place < len(places) and places[place][1] <= start:
                place += 1
            if place < len(places) and places[place][0] < start:
                first = places[place][0]
                allowed = opening if opening is not None else first
                if encoded.ids[place] in self.markup.controls.texts:
                    cuts.add(start)
                elif first >= allowed and not plain[first:start].strip():
                    start = first
                else:
                    cuts.add(opening if opening is not None and first < opening else start)
            after = place
            while after < len(places) and places[after][1] <= end:
                after += 1
            # The token that ends a turn may absorb the blanks after it.
            across = after < len(places) and places[after][0] < end
            if across and encoded.ids[after] not in self.markup.controls.texts:
                cuts.add(end)
            aligned.append(Span(start, end, opening, message))
        return aligned, cuts

    def _check(self, plain: str, span: Span, ids: list[int], first: int, after: int) -> None:
        """Raise `Unverified` unless ids[first:after] decode to the span's text."""
        expected = plain[span.start : span.end]
        if self.codec.is_text(self.codec.text_of(ids, first, after), expected):
            return
        if not all(map(self.codec.knows, set(expected))):
            raise Unverified("characters that the tokenizer does not know")
        raise Unverified("supervised tokens do not decode to the assistant's text")

    def _spans(
        self,
        text: Traced,
        messages: list[Message],
        tools: list[Any] | None,
        supervise_reasoning: bool,
    ) -> list[Span]:
        """Supervised spans in order: each turn's text and the token that ends it."""
        plain = plain_text(text)
        turns = rendered_turns(text)
        spans = []
        for i, turn in enumerate(turns):
            if turn.source.role != "assistant":
                continue
            before = turns[i - 1].end if i else 0
            after = turns[i + 1].start if i + 1 < len(turns) else len(plain)
            marks = [m for m in turn.marks if m.start < m.end] or turn.marks
            given = messages[turn.source.message]
            if marks[0].start == marks[-1].end and given.get("tool_calls"):
                continue  # the template dropped the calls: the turn does not really end here
            start = marks[0].start
            opening = self._opening(plain, before, start, turn.source.message, messages, tools)
            if marks[0].source.field != "content" and marks[0].start < marks[0].end:
                # The assistant writes the tags before reasoning and calls.
                if opening is not None:
                    start = opening
                elif plain[before:start].strip():
                    raise Unverified("start of an assistant turn not found")
            elif opening is not None and not plain[opening:start].strip():
                start = opening
            end = self._ending(plain, turn, after)
            if not supervise_reasoning:
                start = _after_reasoning(plain, marks, start, end)
                opening = None if start > marks[0].start else opening
            spans.append(Span(start, end, opening, turn.source.message))
        return [span for span in spans if span.start < span.end]

    def _opening(
        self,
        plain: str,
        before: int,
        start: int,
        index: int,
        messages: list[Message],
        tools: list[Any] | None,
    ) -> int | None:
        """Where the generation prompt of message `index` ends, between `before` and `start`."""
        for opening in self.markup.openings:
            place = plain.rfind(opening, before, start)
            if place >= 0:
                return place + len(opening)
        if self.markup.openings:
            return None
        # To render everything before each turn takes time quadratic in the number of turns.
        tail = self.markup.user_tail
        user = index and messages[index - 1]["role"] == "user"
        if tail and user and plain.startswith(tail, before, start):
            return before + len(tail)
        try:
            prompt = plain_text(self.renderer.render(messages[:index], tools, True))
        except Unverified:
            return None
        found = plain.startswith(prompt) and before <= len(prompt) <= start
        return len(prompt) if found else None

    def _ending(self, plain: str, turn: RenderedTurn, after: int) -> int:
        """Where the turn ends: behind the token that ends it, if there is one before `after`."""
        for control in self.markup.controls.find_plain(plain[turn.end : after]):
            if control.id in self.markup.eos_ids:
                return turn.end + control.end
            if control.id in self.markup.opener_ids:
                break
        if turn.marks[-1].source.field == "tool_calls":
            raise Unverified("end of a tool call not found")
        return turn.end


_CLOSING_TAG = re.compile(r"\s*(?:</[^<>]*>|\[/[^\]]*\])?\s*")


def _after_reasoning(plain: str, marks: list[Mark], start: int, end: int) -> int:
    """The first character behind a turn's reasoning and the tag that closes it."""
    last = max(
        (i for i, m in enumerate(marks) if m.source.field == "reasoning_content"), default=-1
    )
    if last < 0:
        return start
    following = marks[last + 1] if last + 1 < len(marks) else None
    if following is not None and following.source.field == "content":
        return following.start
    stop = following.start if following is not None else end
    closing = _CLOSING_TAG.match(plain, marks[last].end, stop)
    assert closing is not None  # the pattern matches nothing, too
    return closing.end()
