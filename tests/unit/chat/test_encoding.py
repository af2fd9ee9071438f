"""Tokenizers without offsets."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from transformers import PreTrainedTokenizer

from aerie.chat.encoding import PieceEncoder
from aerie.chat.template import ChatTemplate
from support.chat import TALK, count_controls, spoken, talks
from support.templates import CHATML, TAGGED


class Bytes(PreTrainedTokenizer):
    """A slow tokenizer: one token per byte."""

    model_input_names = ["input_ids"]  # noqa: RUF012

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {**{f"{i:02x}": i for i in range(256)}, **self.added_tokens_encoder}

    def _tokenize(self, text, **_):
        return [f"{b:02x}" for b in text.encode()]

    def _convert_token_to_id(self, token):
        return int(token, 16)

    def _convert_id_to_token(self, index):
        return f"{index:02x}"

    def convert_tokens_to_string(self, tokens):
        parts = [bytes([int(t, 16)]) if len(t) == 2 else t.encode() for t in tokens]
        return b"".join(parts).decode(errors="replace")


class OwnEncode(Bytes):
    """A slow tokenizer with its own `encode`, as Kimi's."""

    def encode(self, text, allow_special_tokens=True, **more):
        if more:
            return super().encode(text, **more)
        parts = self._special.split(text) if allow_special_tokens else [text]
        return [i for part in parts for i in self._part(part, allow_special_tokens)]

    def _part(self, part, allow_special_tokens):
        known = allow_special_tokens and self.added_tokens_encoder.get(part)
        return [known] if known else list(part.encode())

    _special = re.compile(r"(<\|im_(?:start|end)\|>)")

    def _tokenize(self, text, **_):
        names = {i: t for t, i in self.get_vocab().items()}
        return [names[i] for i in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.get_vocab()[token]


def slow_chat(template=CHATML, kind=Bytes):
    tokenizer = kind(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize("kind", [Bytes, OwnEncode])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=talks())
def test_slow_tokenizer_masks_exactly(kind, messages):
    chat = slow_chat(kind=kind)
    assert isinstance(chat.codec.encoder, PieceEncoder)
    masked = chat.mask(messages)
    said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert spoken(chat, masked) == said
    calm = [{**m, "content": "x"} for m in messages]
    assert len(count_controls(chat, masked.input_ids)) == 2 * len(calm)


def test_slow_tokenizer_continues_a_prompt():
    chat = slow_chat()
    ids = chat.prompt_ids(TALK[:1])
    assert chat.next_prompt_ids(TALK[:3], ids + list(b"It is 42.")) == chat.prompt_ids(TALK[:3])
    assert chat.fingerprint == slow_chat().fingerprint != slow_chat(TAGGED).fingerprint
