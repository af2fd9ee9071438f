"""Rendered text to token ids, with control tokens only where the template wrote them.

The plain tokenizer is used wherever it would not mistake a message's text for control tokens, so
ordinary text gets the same ids as from any other tool.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from aerie.chat.controls import Controls, Occurrence
from aerie.chat.tracing import RESERVED
from aerie.chat.unverified import Unverified


class Encoded(NamedTuple):
    """Token ids, and for each the characters [start, end) of the rendering that it encodes."""

    ids: list[int]
    spans: list[tuple[int, int]]


class FastEncoder:
    """Encoding by the tokenizers library, which knows the characters of every token."""

    def __init__(self, backend: Tokenizer, controls: Controls):
        self.controls = controls
        self.data = json.loads(backend.to_str())
        # Post-processors add tokens and trim blanks from the offsets.
        self.data.update(post_processor=None, truncation=None, padding=None)
        self._plain = Tokenizer.from_str(json.dumps(self.data))
        self._renamed_by_start: dict[bool, tuple[Tokenizer, dict[int, int]]] = {}
        texts = [token["content"] for token in self.data["added_tokens"]]
        self._names = {
            text: RESERVED[0] + chr(0xF0000 + i) + RESERVED[1]
            for i, text in enumerate(texts)
            if text in controls.ids
        }

    def normalize(self, text: str) -> str:
        normalizer = self._plain.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def encode(
        self, text: str, controls: list[Occurrence], lookalike: bool, cuts: Sequence[int] = ()
    ) -> Encoded:
        """Encode `text` with exactly `controls` as control tokens.

        `lookalike`: the text has more that the tokenizer would take for one. `cuts`: positions
        where a token must end; what follows a cut is encoded as the continuation of a text.
        """
        if not lookalike and not cuts:
            encoding = self._plain.encode(text, add_special_tokens=False)
            return Encoded(encoding.ids, encoding.offsets)
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, end, continued in _parts(len(text), controls, cuts):
            inside = _within(controls, start, end)
            part = self._encode_part(text, start, end, inside, continued)
            ids += part.ids
            spans += part.spans
        return Encoded(ids, spans)

    def _encode_part(
        self, text: str, start: int, end: int, controls: list[Occurrence], continued: bool
    ) -> Encoded:
        tokenizer, to_id = self._renamed(continued)
        # `places`: where each character of the renamed text is in `text`.
        pieces: list[str] = []
        places: list[int] = []
        position = start
        for control in controls:
            name = self._names[text[control.start : control.end]]
            pieces += [text[position : control.start], name]
            places += range(position, control.start)
            places += [control.start] * len(name)
            position = control.end
        pieces.append(text[position:end])
        places += range(position, end + 1)
        encoding = tokenizer.encode("".join(pieces), add_special_tokens=False)
        found = encoding.ids  # a new list on every access
        spans = []
        for first, after in encoding.offsets:
            # An offset can point behind a control token's name: then it is the next character.
            last = places[after - 1] if after > first else places[first]
            stop = last + 1 if after > first else last
            spans.append((places[first], stop))
        ends = {c.start: c.end for c in controls}
        for i, (first, stop) in enumerate(spans):
            if to_id.get(found[i]) in self.controls.texts:
                # A token that absorbs the blanks beside it covers more than its own text.
                own = next((c for c in range(first, stop) if c in ends), None)
                spans[i] = (first, max(stop, ends[own]) if own is not None else stop)
        return Encoded([to_id.get(i, i) for i in found], spans)

    def _renamed(self, continued: bool) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer with control tokens under names that no text contains, and their ids."""
        if continued not in self._renamed_by_start:
            data = dict(self.data)
            data["added_tokens"] = [
                {**token, "content": self._names.get(token["content"], token["content"])}
                for token in data["added_tokens"]
            ]
            if continued:
                data["normalizer"] = _without_prefix(data.get("normalizer"))
                data["pre_tokenizer"] = _without_prefix(data.get("pre_tokenizer"))
            tokenizer = Tokenizer.from_str(json.dumps(data))
            to_id: dict[int, int] = {}
            for new, old in zip(data["added_tokens"], self.data["added_tokens"], strict=True):
                renamed = tokenizer.token_to_id(new["content"])
                assert renamed is not None  # just added
                to_id[renamed] = old["id"]
            self._renamed_by_start[continued] = tokenizer, to_id
        return self._renamed_by_start[continued]


class PieceEncoder:
    """Encoding by a tokenizer without offsets (slow, or with its own code).

    The text between control tokens is encoded piece by piece; a token's characters are found by
    decoding growing parts of the piece.
    """

    def __init__(self, tokenizer: Any, controls: Controls):
        self.tokenizer, self.controls = tokenizer, controls

    def normalize(self, text: str) -> str:
        return text

    def encode(
        self, text: str, controls: list[Occurrence], lookalike: bool, cuts: Sequence[int] = ()
    ) -> Encoded:
        """As `FastEncoder.encode`; raises `Unverified` when a token's place is not found."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, end, _ in _parts(len(text), controls, cuts):
            position = start
            for control in _within(controls, start, end):
                self._encode_piece(text, position, control.start, ids, spans)
                ids.append(control.id)
                spans.append((control.start, control.end))
                position = control.end
            self._encode_piece(text, position, end, ids, spans)
        return Encoded(ids, spans)

    def _encode_piece(
        self, text: str, start: int, end: int, ids: list[int], spans: list[tuple[int, int]]
    ) -> None:
        piece = text[start:end]
        if not piece:
            return
        found = self.text_ids(piece)
        ids += found
        spans += [(start + a, start + b) for a, b in self._places(piece, found)]

    def text_ids(self, piece: str) -> list[int]:
        """Ids of `piece` as text, also where it looks like control tokens."""
        plain: dict[str, bool] = {"add_special_tokens": False}
        # The last is for tokenizers whose own `encode` delegates when it gets other arguments.
        for options in (
            plain,
            {**plain, "split_special_tokens": True},
            {"allow_special_tokens": False},
        ):
            try:
                ids = self.tokenizer.encode(piece, **options)
            except (TypeError, ValueError):
                continue
            if not any(self.controls.texts.get(i) in self.controls.special for i in ids):
                return list(ids)
        raise Unverified("control token text that the tokenizer cannot take as text")

    def _places(self, piece: str, ids: list[int]) -> list[tuple[int, int]]:
        """Characters of each token; each byte of a character has the whole character."""
        places: list[tuple[int, int]] = []
        start, pending = 0, 0
        for i, _ in enumerate(ids):
            first = i - pending
            got = self.tokenizer.decode(
                ids[first : i + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if got and piece.startswith(got, start):
                end = start + len(got)
                places += [(start, end)] * (pending + 1)
                start, pending = end, 0
            else:
                pending += 1
            if pending > 16:
                break
        if len(places) != len(ids) or start != len(piece):
            raise Unverified("token places not found with this slow tokenizer")
        return places


def _start(control: Occurrence) -> int:
    return control.start


def _within(controls: list[Occurrence], start: int, end: int) -> list[Occurrence]:
    """Those of `controls`, which are in order, inside [start, end)."""
    first = bisect_left(controls, start, key=_start)
    after = bisect_left(controls, end, key=_start)
    return [c for c in controls[first:after] if c.end <= end]


def _parts(
    length: int, controls: list[Occurrence], cuts: Sequence[int]
) -> list[tuple[int, int, bool]]:
    """[0, length) in parts (start, end, continued); a cut's part ends at the next control token."""
    edges: dict[int, bool] = {0: False}
    for cut in sorted(set(cuts)):
        edges[cut] = True
        after = bisect_left(controls, cut, key=_start)
        if after == len(controls):
            continue
        if controls[after].start == cut:
            edges[cut] = False
        else:
            edges.setdefault(controls[after].start, False)
    order = sorted(edges)
    ends = [*order[1:], length]
    return [
        (start, end, edges[start]) for start, end in zip(order, ends, strict=True) if start < end
    ]


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts no blank before a text."""
    if not isinstance(part, dict):
        return part
    part = dict(part)
    if part.get("type") == "Prepend":
        return None
    if "prepend_scheme" in part:
        part["prepend_scheme"] = "never"
    if "add_prefix_space" in part:
        part["add_prefix_space"] = False
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [p for p in map(_without_prefix, part[key]) if p is not None]
    return part
