"""Conversations to token ids and loss masks, by the verifier's own chat template."""

import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from aerie.chat.codec import Codec
from aerie.chat.dropped import find_dropped_fields
from aerie.chat.encoding import Encoded
from aerie.chat.masking import Masked, Masker
from aerie.chat.messages import Message
from aerie.chat.probing import fingerprint, probe_turns
from aerie.chat.rendering import Renderer, rendered_turns
from aerie.chat.tracing import plain_text
from aerie.chat.unverified import Unverified
from aerie.common.errors import InputError

__all__ = ["ChatTemplate", "Masked", "Unverified", "UserTurn"]


class UserTurn(NamedTuple):
    """How the first user turn of a conversation begins and ends."""

    header: list[int]  # ids from the start of the conversation to the user's text
    end_ids: frozenset[int]  # tokens that end the turn


class ChatTemplate:
    """A tokenizer and its chat template.

    Attributes: `tokenizer`; `template`, its text; `fingerprint`, a hash of the tokenizer's
    behaviour, the template, the tokens that end a turn and the fixed date; `eos_ids`, tokens that
    end an assistant's turn; `bos_id`, the token that every sequence starts with, or None;
    `controls`, the tokens that steer the model; `codec`, which encodes and decodes.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int] = ()):
        """Take a tokenizer object; `eos_ids` are further tokens that end a turn.

        Raises `InputError` when it has no chat template or one that is not valid.
        """
        self.tokenizer = tokenizer
        found = tokenizer.chat_template
        if not found:
            raise InputError(
                "the verifier's tokenizer has no chat template; put one as chat_template.jinja"
                " into its folder"
            )
        self.template = found if isinstance(found, str) else json.dumps(found, sort_keys=True)
        declared = frozenset(i for i in (*eos_ids, tokenizer.eos_token_id) if isinstance(i, int))
        markup = probe_turns(tokenizer, self.template, declared)
        self.controls, self.eos_ids = markup.controls, markup.eos_ids
        self._renderer = Renderer(tokenizer, self.template, self.controls)
        self.codec = Codec(tokenizer, self.controls, self._renderer)
        self._masker = Masker(self._renderer, self.codec, markup)
        self.bos_id = self.codec.bos_id
        self.fingerprint = fingerprint(tokenizer, self.template, self.codec, self.eos_ids)

    @classmethod
    def load(cls, folder: str | Path, trust_remote_code: bool = False) -> "ChatTemplate":
        """The chat template of a checkpoint folder, without a network.

        Tokens that end a turn are also taken from `generation_config.json` and `config.json`.
        Raises `InputError` when the folder has no usable tokenizer or template.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; expected a verifier's checkpoint")
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # transformers raises many kinds for damaged files
            raise InputError(f"{folder}: the tokenizer does not load: {error}") from error
        eos: list[int] = []
        for name in ("generation_config.json", "config.json"):
            try:
                given = json.loads((folder / name).read_text(encoding="utf-8"))["eos_token_id"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            eos += given if isinstance(given, list) else [given]
        try:
            return cls(tokenizer, eos)
        except InputError as error:
            raise InputError(f"{folder}: {error}") from None

    @property
    def control_ids(self) -> set[int]:
        """Tokens that steer the model: special ones, those around turns, tags for reasoning."""
        return set(self.controls.texts)

    def prompt_ids(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Ids of the conversation so far and of the header of the next answer.

        Raises `Unverified` when the template refuses the conversation.
        """
        return self.codec.encode_with_bos(self._renderer.render(messages, tools, True)).ids

    def user_turn(self) -> UserTurn:
        """What precedes the user's text in a conversation that starts with it, and what ends it.

        A token that would join blanks of the header to the text is not part of the header: whoever
        writes the text writes it. Raises `InputError` when the template does not show the user's
        text, writes nothing before it, or writes no token that ends it.
        """
        messages = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
        ]
        try:
            text = self._renderer.render(messages, None, False)
            encoded = self.codec.encode_with_bos(text)
        except Unverified as error:
            raise InputError(
                f"the chat template does not render a plain conversation: {error.reason}"
            ) from error
        user = next((t for t in rendered_turns(text) if t.source.role == "user"), None)
        if user is None:
            raise InputError("the chat template does not show the user's text")
        after = min((m.start for m in text.marks if m.start >= user.end), default=len(text))
        ends = self.controls.find_plain(plain_text(text)[user.end : after])
        header = [i for i, (_, end) in zip(*encoded, strict=True) if end <= user.start]
        if not header or not ends:
            missing = "token after the user's text" if header else "text before the user's"
            raise InputError(f"the chat template sets no {missing}")
        return UserTurn(header, self.eos_ids | {ends[0].id})

    def next_prompt_ids(
        self, messages: list[Message], ids: list[int], tools: list[Any] | None = None
    ) -> list[int] | None:
        """The prompt of the next answer, continued from `ids`.

        `ids` ends with the engine's own ids of the last answer, `messages` with the turns after
        it. The result starts with exactly `ids` and ends with the header of the next answer; an
        answer that was cut off gets the token that ends its turn. None when the template now
        renders earlier turns differently (blanks aside): the conversation then needs a new sample,
        from `prompt_ids`.
        """
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        text = self._renderer.render(messages, tools, True)
        plain = plain_text(text)
        turns = rendered_turns(text)
        at = next((i for i, t in enumerate(turns) if t.source.message == last), None)
        if at is None or last < 0:
            return None
        position = turns[at].end
        ended = bool(ids) and ids[-1] in self.eos_ids
        if not self._same_so_far(plain[:position], ids[:-1] if ended else ids):
            return None
        if ended:
            tail_end = turns[at + 1].start if at + 1 < len(turns) else len(text)
            tail = self.controls.find_plain(plain[position:tail_end])
            if not tail or tail[0].id != ids[-1]:
                return None
            position += tail[0].end
        elif self.codec.text(ids)[-1:].isspace():
            # A template that strips an answer and writes a blank of its own after it.
            position = len(text) - len(plain[position:].lstrip(" "))
        encoded = self.codec.encode(text)
        if self._straddles(encoded, position, ended):
            encoded = self.codec.encode(text, [position])
        rest = [i for i, (start, _) in zip(*encoded, strict=True) if start >= position]
        return [*ids, *rest]

    def _same_so_far(self, text: str, ids: list[int]) -> bool:
        """Whether `ids` decode to the rendering `text`, blanks aside."""
        if self.bos_id is not None and ids[:1] == [self.bos_id]:
            ids = ids[1:]
            while text.startswith(self.tokenizer.bos_token):
                text = text.removeprefix(self.tokenizer.bos_token)
        got, expected = (
            _without_blanks(self.codec.normalize(t)) for t in (self.codec.text(ids), text)
        )
        return got == expected

    def _straddles(self, encoded: Encoded, position: int, after_control: bool) -> bool:
        """Whether a token reaches across `position`.

        `after_control`: a control token ends there, and may absorb the blanks after it.
        """
        for i, (start, end) in zip(*encoded, strict=True):
            if start < position < end:
                return not (after_control and i in self.controls.texts)
        return False

    def mask(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        supervise_reasoning: bool = True,
    ) -> Masked:
        """The whole conversation with its own answers, and what of it is supervised.

        Raises `Unverified` when the template refuses the conversation, renders nothing of the
        assistant, or when the supervised tokens do not decode to the assistant's text.
        """
        return self._masker.mask(messages, tools, supervise_reasoning)

    def dropped_fields(self, messages: list[Message], tools: list[Any] | None = None) -> list[str]:
        """What was given and is not in the rendering, in this order:

        `system`, `tools`, `content`, `reasoning_content`, `tool_calls`. Blanks that a template
        strips do not count. Raises `Unverified` when the template refuses the conversation.
        """
        rendered = self._renderer.render(messages, tools, False)
        return find_dropped_fields(rendered, messages, tools)

    def text_of(self, ids: list[int], start: int, end: int) -> str:
        """The text of ids[start:end] within the sequence, special tokens included."""
        return self.codec.text_of(ids, start, end)

    def decode(self, ids: list[int]) -> str:
        """An answer's text, without special tokens and the token that ended it."""
        ids = list(ids)
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _without_blanks(text: str) -> str:
    """The text without blanks, also without SentencePiece's visible one."""
    return "".join(unicodedata.normalize("NFKC", text).replace("▁", " ").split())
