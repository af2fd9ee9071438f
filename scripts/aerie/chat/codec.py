"""A tokenizer as the rest of this package uses it: renderings to ids and back."""

from collections.abc import Iterable
from typing import Any

from aerie.chat.controls import Controls, overlapping
from aerie.chat.encoding import Encoded, FastEncoder, PieceEncoder
from aerie.chat.rendering import Renderer
from aerie.chat.tracing import Traced, plain_text
from aerie.chat.unverified import Unverified


class Codec:
    """Encodes renderings, with control tokens only where the template wrote them, and decodes.

    Attributes: `encoder`; `bos_id`, the token that every sequence starts with, or None.
    """

    def __init__(self, tokenizer: Any, controls: Controls, renderer: Renderer):
        self.tokenizer, self.controls = tokenizer, controls
        self.encoder = self._choose_encoder(renderer)
        probe = tokenizer("a▁b", add_special_tokens=False)["input_ids"]
        self._visible_blank = "▁" not in self.text(list(probe))
        bos, ids = tokenizer.bos_token_id, tokenizer("x")["input_ids"]
        self.bos_id = bos if bos is not None and len(ids) > 0 and ids[0] == bos else None

    def _choose_encoder(self, renderer: Renderer) -> FastEncoder | PieceEncoder:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if getattr(self.tokenizer, "is_fast", False) and backend is not None:
            encoder = FastEncoder(backend, self.controls)
            messages = [{"role": "user", "content": "Hi, it's 3°.\n\n x"}]
            probe = renderer.render(messages, None, True)
            expected = self.tokenizer(plain_text(probe), add_special_tokens=False)["input_ids"]
            if self._encode(encoder, probe, []).ids == list(expected):
                return encoder
        return PieceEncoder(self.tokenizer, self.controls)

    def encode(self, text: Traced, cuts: Iterable[int] = ()) -> Encoded:
        """The rendering as ids; no token reaches across a position of `cuts`.

        Raises `Unverified` when a message's text would become a control token.
        """
        return self._encode(self.encoder, text, sorted(set(cuts)))

    def _encode(
        self, encoder: FastEncoder | PieceEncoder, text: Traced, cuts: list[int]
    ) -> Encoded:
        controls, lookalike = self.controls.find(text)
        plain = plain_text(text)
        encoded = encoder.encode(plain, controls, lookalike, cuts)
        if self._holds_control(text, encoded):
            # The tokenizer finds more than an exact search, for instance in another case.
            encoded = encoder.encode(plain, controls, True, cuts)
            if self._holds_control(text, encoded):
                raise Unverified("control token text that the tokenizer cannot take as text")
        return encoded

    def _holds_control(self, text: Traced, encoded: Encoded) -> bool:
        """Whether a message's text became a control token."""
        starts = [mark.start for mark in text.marks]
        special, texts = self.controls.special, self.controls.texts
        plain = plain_text(text)
        for i, (start, end) in zip(encoded.ids, encoded.spans, strict=True):
            if texts.get(i) in special:
                own = plain.find(texts[i], start, end)
                if own < 0 or overlapping(text.marks, starts, own, own + len(texts[i])):
                    return True
        return False

    def encode_with_bos(self, text: Traced, cuts: Iterable[int] = ()) -> Encoded:
        """As `encode`, with exactly one BOS whether the template or the tokenizer adds it."""
        encoded = self.encode(text, cuts)
        ids, spans = list(encoded.ids), list(encoded.spans)
        if self.bos_id is not None:
            while ids[:2] == [self.bos_id] * 2:
                del ids[0], spans[0]
            if ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
                spans.insert(0, (0, 0))
        return Encoded(ids, spans)

    def text(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens included."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def text_of(self, ids: list[int], start: int, end: int) -> str:
        """The text of ids[start:end] within the sequence, special tokens included."""
        # Decoded alone, a run may lose its first blank, so the token before it is decoded too.
        before = self.text(ids[max(0, start - 1) : start])
        return self.text(ids[max(0, start - 1) : end])[len(before) :]

    def normalize(self, text: str) -> str:
        return self.encoder.normalize(text)

    def is_text(self, got: str, expected: str) -> bool:
        """Whether a decoded text equals `expected`, as far as the tokenizer can tell."""
        # SentencePiece-like tokenizers put a blank before a text, and read "▁" as a blank.
        return any(
            got.startswith(blank)
            and self._readings(got.removeprefix(blank)) & self._readings(expected)
            for blank in ("", " ")
        )

    def knows(self, character: str) -> bool:
        """Whether the character survives encoding and decoding."""
        ids = self.tokenizer(character, add_special_tokens=False)["input_ids"]
        return character == " " or bool(
            self._readings(self.text(list(ids)).strip(" ")) & self._readings(character)
        )

    def _readings(self, text: str) -> set[str]:
        """`text`, and `text` as the tokenizer reads it: blanks, composed characters, case."""
        if self._visible_blank:
            text = text.replace("▁", " ")
            for control in reversed(self.controls.find_plain(text)):
                text = text[: control.end] + text[control.end :].lstrip(" ")
        return {text, self.normalize(text)}
