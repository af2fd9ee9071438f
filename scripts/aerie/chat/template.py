"""Conversations to token ids and loss masks, by the verifier's own chat template.

The mask covers what the assistant said and the token that ends its turn, nothing else. Where
that lies is known character by character (`rendering.py`), then token by token (`encoding.py`),
and checked on every call by decoding. See `docs/loss_masks.md`.
"""

import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from transformers import AutoTokenizer

from aerie.chat.encoding import (
    Controls,
    Encoded,
    FastEncoder,
    Occurrence,
    PieceEncoder,
    Unverified,
    overlapping,
)
from aerie.chat.tracing import (
    FIXED_DATE,
    RESERVED,
    Mark,
    Source,
    Traced,
    compile_template,
    fixed_strftime,
    trace,
)
from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.versions import TEMPLATE_VERSION

__all__ = ["ChatTemplate", "Masked", "Unverified"]

# What an assistant writes, by the name of the field; other fields are the template's business.
WRITTEN = ("content", "reasoning_content", "tool_calls")


class Masked(NamedTuple):
    """A conversation as tokens."""

    input_ids: list[int]  # [length]
    loss_mask: list[bool]  # [length], True where the assistant wrote the token
    last_turn: int  # index of the first supervised token of the last assistant turn


class Span(NamedTuple):
    """Supervised characters [start, end) of a rendering.

    `opening` is where the generation prompt ends, if known: the assistant may have written the
    blanks from there to `start`, where a token joins them to its text.
    """

    start: int
    end: int
    opening: int | None
    message: int


class UserTurn(NamedTuple):
    """How the first user turn of a conversation begins and ends."""

    header: list[int]  # ids from the start of the conversation to the user's text
    end_ids: frozenset[int]  # tokens that end the turn


class Turn(NamedTuple):
    """Marks of one message that stand together in a rendering."""

    source: Source
    marks: list[Mark]

    @property
    def start(self) -> int:
        return self.marks[0].start

    @property
    def end(self) -> int:
        return self.marks[-1].end


class ChatTemplate:
    """A tokenizer and its chat template.

    Attributes: `tokenizer`, `template` (its text), `fingerprint` (hash of the tokenizer's
    behaviour, the template, the tokens that end a turn and the fixed date), `eos_ids` (tokens
    that end an assistant's turn), `bos_id` (the token every sequence starts with, or None).
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
        self._compiled: dict[str, Any] = {}
        self._added = {
            str(token): (token_id, bool(token.special))
            for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self.eos_ids = frozenset(
            i for i in (*eos_ids, tokenizer.eos_token_id) if isinstance(i, int)
        )
        # Until the turns have been looked at, every added token may belong to them.
        self._controls = Controls({text: i for text, (i, _) in self._added.items()}, {})
        self._learn_turns()
        self._encoder = self._make_encoder()
        probe = tokenizer("a▁b", add_special_tokens=False)["input_ids"]
        self._visible_blank = "▁" not in self._text(list(probe))
        self.bos_id = self._find_bos()
        self.fingerprint = self._find_fingerprint()

    @classmethod
    def load(cls, folder: str | Path, trust_remote_code: bool = False) -> "ChatTemplate":
        """The chat template of a checkpoint folder, without a network.

        Tokens that end a turn are also taken from `generation_config.json` and `config.json`.
        Raises `InputError` when the folder holds no usable tokenizer or template.
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

    # What is fixed for a verifier.

    def _learn_turns(self) -> None:
        """Find from small conversations what stands around turns.

        Sets `_controls`, `_generation` (the text of the generation prompt, "" if it has none),
        `_user_tail` (without a generation prompt: what ends a user's turn) and adds to `eos_ids`
        the token that the template sets after an assistant's text.
        """
        user = {"role": "user", "content": "u"}
        answer = {"role": "assistant", "content": "a"}
        self._generation = self._user_tail = ""
        try:
            before = self._render([user], None, False)
            prompt = str.__str__(self._render([user], None, True))
            whole = self._render([user, answer, user, answer], None, False)
        except Unverified as error:
            raise InputError(
                f"the chat template does not render a plain conversation: {error.reason}"
            ) from error
        if prompt.startswith(str.__str__(before)):
            self._generation = prompt[len(before) :]
        answers = [m for m in whole.marks if m.source.role == "assistant"]
        around = str.__str__(whole) + prompt
        special, markup = {}, {}
        for text, (token_id, is_special) in self._added.items():
            # Tags that come in pairs (<think>) and blanks are a tokenizer's vocabulary; other
            # tokens around turns steer, whether or not they are declared special.
            paired = f"</{text[1:]}" in self._added or f"<{text[2:]}" in self._added
            if is_special or (text in around and text.strip() and not paired):
                special[text] = token_id
            elif text in self.template and text.strip():
                markup[text] = token_id
        self._controls = Controls(special, markup)
        if answers:
            ends, _ = self._controls.find(whole.cut(answers[-1].end, len(whole)))
            if ends:
                self.eos_ids |= {ends[0].id}
        if not self._generation and len(answers) == 2:
            # A template without a generation prompt: what it sets between turns comes before
            # the answer, except what already ends the user's turn.
            tail = str.__str__(before)[before.marks[-1].end :] if before.marks else ""
            users = [m.end for m in whole.marks if m.end <= answers[0].start]
            header = str.__str__(whole)[max(users, default=0) : answers[0].start]
            if header.startswith(tail):
                self._generation = header[len(tail) :].strip(" ")
                self._user_tail = tail
        opening = [c.end for c in self._find_controls(self._generation)]
        lines = [m.end() for m in re.finditer("\n", self._generation)]
        ends = {len(self._generation), *opening, *lines} - {0}
        self._openings = [
            self._generation[:end]
            for end in sorted(ends, reverse=True)
            if self._generation[:end].strip()
        ]
        self._opener_ids = {c.id for c in self._find_controls(self._generation)} - self.eos_ids

    def _find_controls(self, text: str) -> list[Occurrence]:
        return self._controls.find(Traced(text))[0]

    def _make_encoder(self) -> FastEncoder | PieceEncoder:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if getattr(self.tokenizer, "is_fast", False) and backend is not None:
            encoder = FastEncoder(backend, self._controls)
            probe = self._render([{"role": "user", "content": "Hi, it's 3°.\n\n x"}], None, True)
            expected = self.tokenizer(str.__str__(probe), add_special_tokens=False)["input_ids"]
            if self._encode(probe, (), encoder).ids == list(expected):
                return encoder
        return PieceEncoder(self.tokenizer, self._controls)

    def _find_bos(self) -> int | None:
        bos = self.tokenizer.bos_token_id
        ids = self.tokenizer("x")["input_ids"]
        return bos if bos is not None and len(ids) > 0 and ids[0] == bos else None

    def _find_fingerprint(self) -> str:
        if isinstance(self._encoder, FastEncoder):
            behaviour: Any = self._encoder.data
        else:
            behaviour = [
                type(self.tokenizer).__name__,
                self.tokenizer.get_vocab(),
                self._encoder._text_ids("The 12 quick\n\n  brown föxes 🙂, isn't it?"),
            ]
        added = sorted((i, text, special) for text, (i, special) in self._added.items())
        return digest(
            TEMPLATE_VERSION,
            behaviour,
            added,
            self.template,
            self.tokenizer.special_tokens_map,
            self.bos_id,
            sorted(self.eos_ids),
            FIXED_DATE.isoformat(),
        )

    # Rendering.

    def _render(self, messages: list[dict], tools: list | None, generation: bool) -> Traced:
        """The conversation as text with marks, equal to transformers' own rendering."""
        given = _plain_messages(messages)
        try:
            return self._render_both(given, tools, generation)
        except TypeError:
            # Some templates paste a call's arguments as text and fail on an object.
            if not any(message.get("tool_calls") for message in given):
                raise Unverified("the chat template fails on this conversation") from None
        try:
            return self._render_both(_text_arguments(given), tools, generation)
        except TypeError:
            raise Unverified("the chat template fails on this conversation") from None

    def _render_both(self, messages: list[dict], tools: list | None, generation: bool) -> Traced:
        tools = tools or None
        variables: dict[str, Any] = {}
        if "date_string" in self.template:
            variables["date_string"] = fixed_strftime("%d %b %Y")
        try:
            expected = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation,
                strftime_now=fixed_strftime,
                **variables,
            )
            template = self.tokenizer.get_chat_template(None, tools)
            if template not in self._compiled:
                self._compiled[template] = compile_template(template)
            rendered = self._compiled[template](
                **self.tokenizer.special_tokens_map,
                **variables,
                messages=[_trace_message(i, message) for i, message in enumerate(messages)],
                tools=trace(tools, -1, "tools", "tools"),
                documents=None,
                add_generation_prompt=generation,
            )
        except jinja2.TemplateError as error:
            raise Unverified(f"the chat template refuses: {str(error)[:80]}") from error
        except TypeError:
            raise  # perhaps for the form of a call's arguments, see `_render`
        except Exception as error:  # a template is a program, it can fail in any way
            raise Unverified("the chat template fails on this conversation") from error
        if str.__str__(rendered) != expected:
            raise Unverified("the rendering cannot be traced")
        if RESERVED[0] in expected:
            raise Unverified("reserved characters (U+10FDD0) in the text")
        try:
            expected.encode()
        except UnicodeEncodeError:
            raise Unverified("text that is not valid Unicode (lone surrogates)") from None
        self._refuse_hidden(rendered, messages)
        return rendered

    def _refuse_hidden(self, rendered: Traced, messages: list[dict]) -> None:
        """A text rendered without its marks would count as the template's: refuse it."""
        marked = {(m.source.message, m.source.field) for m in rendered.marks}
        plain = None
        for i, message in enumerate(messages):
            content = message["content"].strip()
            if not content or {(i, "content"), (i, "reasoning_content")} & marked:
                continue
            if plain is None:
                plain = _unmarked(rendered)
            looks = self._controls._pattern.search(content) or message["role"] == "assistant"
            if looks and len(content) > 1 and content in plain:
                raise Unverified("the rendering cannot be traced")

    # Encoding.

    def _encode(
        self,
        text: Traced,
        cuts: Iterable[int] = (),
        encoder: FastEncoder | PieceEncoder | None = None,
    ) -> Encoded:
        encoder = encoder or self._encoder
        controls, lookalike = self._controls.find(text)
        plain = str.__str__(text)
        encoded = encoder.encode(plain, controls, lookalike, sorted(set(cuts)))
        if self._holds_control(text, encoded):
            # Found by the tokenizer beyond an exact search, for instance in another case.
            encoded = encoder.encode(plain, controls, True, sorted(set(cuts)))
            if self._holds_control(text, encoded):
                raise Unverified("control token text that the tokenizer cannot take as text")
        return encoded

    def _holds_control(self, text: Traced, encoded: Encoded) -> bool:
        """Whether a message's text became a control token."""
        starts = [mark.start for mark in text.marks]
        special = self._controls.special
        texts = self._controls.texts
        plain = str.__str__(text)
        for i, (start, end) in zip(encoded.ids, encoded.spans, strict=True):
            if texts.get(i) in special:
                own = plain.find(texts[i], start, end)
                if own < 0 or overlapping(text.marks, starts, own, own + len(texts[i])):
                    return True
        return False

    def _with_bos(self, encoded: Encoded) -> Encoded:
        """Exactly one token to begin with, whether the template or the tokenizer sets it."""
        ids, spans = list(encoded.ids), list(encoded.spans)
        if self.bos_id is not None:
            while ids[:2] == [self.bos_id] * 2:
                del ids[0], spans[0]
            if ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
                spans.insert(0, (0, 0))
        return Encoded(ids, spans)

    def prompt_ids(self, messages: list[dict], tools: list | None = None) -> list[int]:
        """Ids of the conversation so far and the header of the answer to come.

        Raises `Unverified` when the template refuses the conversation.
        """
        return self._with_bos(self._encode(self._render(messages, tools, True))).ids

    def user_turn(self) -> UserTurn:
        """What stands before a user's text in a conversation without more, and what ends it.

        A token that would join blanks of the header to the text is left out of the header: it is
        the writer's. Raises `InputError` when the template shows no user's text, sets nothing
        before it, or no token after it that says that it has ended.
        """
        messages = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
        ]
        try:
            text = self._render(messages, None, False)
            encoded = self._with_bos(self._encode(text))
        except Unverified as error:
            raise InputError(
                f"the chat template does not render a plain conversation: {error.reason}"
            ) from error
        user = next((t for t in _turns(text) if t.source.role == "user"), None)
        if user is None:
            raise InputError("the chat template does not show the user's text")
        after = min((m.start for m in text.marks if m.start >= user.end), default=len(text))
        ends = self._find_controls(str.__str__(text)[user.end : after])
        header = [i for i, (_, end) in zip(*encoded, strict=True) if end <= user.start]
        if not header or not ends:
            missing = "token after the user's text" if header else "text before the user's"
            raise InputError(f"the chat template sets no {missing}")
        return UserTurn(header, self.eos_ids | {ends[0].id})

    def next_prompt_ids(
        self, messages: list[dict], ids: list[int], tools: list | None = None
    ) -> list[int] | None:
        """Go on from `ids`, which end with the engine's own ids of the last answer.

        `messages` ends with the turn(s) after that answer. The result begins with exactly `ids`
        and goes on to the header of the next answer; an answer that was cut gets the token that
        ends its turn. None: the template now renders earlier turns in another way (blanks
        aside), so the conversation needs a new sample, from `prompt_ids`.
        """
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        text = self._render(messages, tools, True)
        turns = _turns(text)
        at = next((i for i, t in enumerate(turns) if t.source.message == last), None)
        if at is None or last < 0:
            return None
        position = turns[at].end
        ended = bool(ids) and ids[-1] in self.eos_ids
        if not self._same_so_far(str.__str__(text)[:position], ids[:-1] if ended else ids):
            return None
        if ended:
            tail_end = turns[at + 1].start if at + 1 < len(turns) else len(text)
            tail = self._find_controls(str.__str__(text)[position:tail_end])
            if not tail or tail[0].id != ids[-1]:
                return None
            position += tail[0].end
        elif self._text(ids)[-1:].isspace():
            # A template that strips an answer and sets a blank of its own after it.
            position = len(text) - len(str.__str__(text)[position:].lstrip(" "))
        encoded = self._encode(text)
        if self._straddles(encoded, position, ended):
            encoded = self._encode(text, [position])
        rest = [i for i, (start, _) in zip(*encoded, strict=True) if start >= position]
        return [*ids, *rest]

    def _same_so_far(self, text: str, ids: list[int]) -> bool:
        """Whether `ids` say the same as the rendering `text`, blanks aside."""
        if self.bos_id is not None and ids[:1] == [self.bos_id]:
            ids = ids[1:]
            while text.startswith(self.tokenizer.bos_token):
                text = text.removeprefix(self.tokenizer.bos_token)
        got, expected = (_squeezed(self._encoder.normalize(t)) for t in (self._text(ids), text))
        return got == expected

    def _straddles(self, encoded: Encoded, position: int, after_control: bool = False) -> bool:
        """Whether a token reaches across `position`.

        `after_control`: a control token ends there, and the blanks it swallows are its own.
        """
        for i, (start, end) in zip(*encoded, strict=True):
            if start < position < end:
                return not (after_control and i in self._controls.texts)
        return False

    # Masks.

    def mask(
        self, messages: list[dict], tools: list | None = None, supervise_reasoning: bool = True
    ) -> Masked:
        """The whole conversation with its own answers, and what of it is supervised.

        Raises `Unverified` when the template refuses the conversation, renders nothing of the
        assistant, or when the supervised tokens do not decode to the assistant's text.
        """
        text = self._render(messages, tools, False)
        spans = self._spans(text, messages, tools, supervise_reasoning)
        if not spans:
            raise Unverified("no assistant text in the rendering")
        cuts: set[int] = set()
        for _ in range(4):
            encoded = self._with_bos(self._encode(text, cuts))
            spans, more = self._settle(text, spans, encoded)
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
            self._check(str.__str__(text), span, encoded.ids, first, place)
            if place > first:
                firsts.append((span.message, first))
        if not firsts:
            raise Unverified("no assistant text in the rendering")
        last_message = firsts[-1][0]
        return Masked(encoded.ids, mask, next(f for m, f in firsts if m == last_message))

    def _settle(
        self, text: Traced, spans: list[Span], encoded: Encoded
    ) -> tuple[list[Span], set[int]]:
        """Move starts to tokens' starts where the blanks before belong to the assistant.

        Also returns positions where a token must be cut since it reaches across an edge.
        """
        settled, cuts = [], set()
        places = encoded.spans
        plain = str.__str__(text)
        place = 0
        for span in spans:
            start, end, opening, message = span
            while place < len(places) and places[place][1] <= start:
                place += 1
            if place < len(places) and places[place][0] < start:
                first = places[place][0]
                allowed = opening if opening is not None else first
                if encoded.ids[place] in self._controls.texts:
                    cuts.add(start)
                elif first >= allowed and not plain[first:start].strip():
                    start = first
                else:
                    cuts.add(opening if opening is not None and first < opening else start)
            after = place
            while after < len(places) and places[after][1] <= end:
                after += 1
            # The token that ends a turn may swallow blanks after it.
            across = after < len(places) and places[after][0] < end
            if across and encoded.ids[after] not in self._controls.texts:
                cuts.add(end)
            settled.append(Span(start, end, opening, message))
        return settled, cuts

    def _check(self, plain: str, span: Span, ids: list[int], first: int, after: int) -> None:
        """Raise `Unverified` unless ids[first:after] decode to the span's text."""
        expected = plain[span.start : span.end]
        got = self.text_of(ids, first, after)
        # SentencePiece-like tokenizers set a blank before a text, and read "▁" as a blank.
        for first_blank in ("", " "):
            if got.startswith(first_blank) and self._readings(
                got.removeprefix(first_blank)
            ) & self._readings(expected):
                return
        if not all(map(self._knows, set(expected))):
            raise Unverified("characters that the tokenizer does not know")
        raise Unverified("supervised tokens do not decode to the assistant's text")

    def _knows(self, character: str) -> bool:
        ids = self.tokenizer(character, add_special_tokens=False)["input_ids"]
        return character == " " or bool(
            self._readings(self._text(list(ids)).strip(" ")) & self._readings(character)
        )

    def _readings(self, text: str) -> set[str]:
        """`text` as it is and as the tokenizer takes it: blanks, composed characters, case."""
        if self._visible_blank:
            text = text.replace("▁", " ")
            found = self._find_controls(text)
            for control in reversed(found):
                text = text[: control.end] + text[control.end :].lstrip(" ")
        return {text, self._encoder.normalize(text)}

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _spans(
        self, text: Traced, messages: list[dict], tools: list | None, supervise_reasoning: bool
    ) -> list[Span]:
        """Supervised spans in order: each turn's text and the token that ends it."""
        plain = str.__str__(text)
        turns = _turns(text)
        spans = []
        for i, turn in enumerate(turns):
            if turn.source.role != "assistant":
                continue
            before = turns[i - 1].end if i else 0
            after = turns[i + 1].start if i + 1 < len(turns) else len(plain)
            marks = [m for m in turn.marks if m.start < m.end] or turn.marks
            given = messages[turn.source.message]
            if marks[0].start == marks[-1].end and given.get("tool_calls"):
                continue  # the template lost the calls: that the turn ends here is not so
            start = marks[0].start
            opening = self._opening(plain, before, start, turn.source.message, messages, tools)
            if marks[0].source.field != "content" and marks[0].start < marks[0].end:
                # Tags before reasoning and calls are the assistant's to write.
                if opening is not None:
                    start = opening
                elif plain[before:start].strip():
                    raise Unverified("start of an assistant turn not found")
            elif opening is not None and not plain[opening:start].strip():
                start = opening
            end = self._ending(plain, turn, after)
            if not supervise_reasoning:
                start = self._after_reasoning(plain, marks, start, end)
                opening = None if start > marks[0].start else opening
            spans.append(Span(start, end, opening, turn.source.message))
        return [span for span in spans if span.start < span.end]

    def _opening(
        self,
        plain: str,
        before: int,
        start: int,
        index: int,
        messages: list[dict],
        tools: list | None,
    ) -> int | None:
        """Where the generation prompt of message `index` ends, between `before` and `start`."""
        for opening in self._openings:
            place = plain.rfind(opening, before, start)
            if place >= 0:
                return place + len(opening)
        if self._openings:
            return None
        # Rendering what stands before every turn would take time in the square of the turns.
        tail = self._user_tail
        user = index and messages[index - 1]["role"] == "user"
        if tail and user and plain.startswith(tail, before, start):
            return before + len(tail)
        try:
            prompt = str.__str__(self._render(messages[:index], tools, True))
        except Unverified:
            return None
        found = plain.startswith(prompt) and before <= len(prompt) <= start
        return len(prompt) if found else None

    def _ending(self, plain: str, turn: Turn, after: int) -> int:
        """Where the turn ends: after the token that says so, if there is one before `after`."""
        for control in self._find_controls(plain[turn.end : after]):
            if control.id in self.eos_ids:
                return turn.end + control.end
            if control.id in self._opener_ids:
                break
        if turn.marks[-1].source.field == "tool_calls":
            raise Unverified("end of a tool call not found")
        return turn.end

    def _after_reasoning(self, plain: str, marks: list[Mark], start: int, end: int) -> int:
        """The first character after a turn's reasoning and the tag that closes it."""
        last = max(
            (i for i, m in enumerate(marks) if m.source.field == "reasoning_content"), default=-1
        )
        if last < 0:
            return start
        following = marks[last + 1] if last + 1 < len(marks) else None
        if following is not None and following.source.field == "content":
            return following.start
        stop = following.start if following is not None else end
        closing = re.compile(r"\s*(?:</[^<>]*>|\[/[^\]]*\])?\s*")
        return closing.match(plain, marks[last].end, stop).end()

    # Looking at conversations.

    def losses(self, messages: list[dict], tools: list | None = None) -> list[str]:
        """What was given and does not appear in the rendering, of these names in this order:

        `system`, `tools`, `content`, `reasoning_content`, `tool_calls`. Text that a template
        strips of blanks is not lost. Raises `Unverified` when the template refuses.
        """
        rendered = self._render(messages, tools, False)
        shown: dict[tuple[int, str], set[str]] = {}
        length: dict[tuple[int, str], int] = {}
        for mark in rendered.marks:
            key = mark.source.message, mark.source.field
            shown.setdefault(key, set()).add(str.__str__(rendered)[mark.start : mark.end])
            length[key] = length.get(key, 0) + mark.end - mark.start
        lost = set()
        if tools and (-1, "tools") not in shown:
            lost.add("tools")
        for i, message in enumerate(_plain_messages(messages)):
            traced = _trace_message(i, message)
            for field in ("content", "reasoning_content"):
                for mark in getattr(traced.get(field), "marks", ()):
                    key = i, mark.source.field
                    text = traced[field][mark.start : mark.end].strip()
                    if text and length.get(key, 0) < len(_without_tags(text)):
                        system = message["role"] in ("system", "developer")
                        lost.add("system" if system else mark.source.field)
            for call in message.get("tool_calls") or ():
                texts = shown.get((i, "tool_calls"), set())
                function = call["function"]
                wanted = _strings([function.get("name"), function.get("arguments")])
                if any(w.strip() and not _appears(w, texts) for w in wanted):
                    lost.add("tool_calls")
        order = ("system", "tools", "content", "reasoning_content", "tool_calls")
        return [name for name in order if name in lost]

    @property
    def control_ids(self) -> set[int]:
        """Tokens that steer the model: special ones, those around turns, tags for reasoning."""
        return set(self._controls.texts)

    def text_of(self, ids: list[int], start: int, end: int) -> str:
        """What ids[start:end] say within the sequence, special tokens shown."""
        # By itself a run may lose its first blank, so one token before comes along.
        before = self._text(ids[max(0, start - 1) : start])
        return self._text(ids[max(0, start - 1) : end])[len(before) :]

    def decode(self, ids: list[int]) -> str:
        """An answer's text, without special tokens and the token that ended it."""
        ids = list(ids)
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _plain_messages(messages: list[dict]) -> list[dict]:
    """Messages with call arguments as objects, absent fields left out, content always text."""
    found = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        message.setdefault("content", "")
        if message.get("tool_calls"):
            message["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
        else:
            message.pop("tool_calls", None)
        found.append(message)
    return found


def _plain_call(call: dict) -> dict:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise Unverified("tool call arguments are not valid JSON") from None
    return {**call, "function": function}


def _text_arguments(messages: list[dict]) -> list[dict]:
    """The messages with call arguments as JSON text."""
    found = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(
                            call["function"].get("arguments", {}), ensure_ascii=False
                        ),
                    },
                }
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        found.append(message)
    return found


def _trace_message(index: int, message: dict) -> dict:
    """The message with its texts traced; reasoning inside the content counts as reasoning."""
    role = message["role"]
    traced = dict(message)
    fields = WRITTEN if role == "assistant" else [key for key in message if key != "role"]
    for field in fields:
        if field in message:
            traced[field] = trace(message[field], index, role, field)
    content = message["content"]
    if role == "assistant" and isinstance(content, str) and "</think>" in content:
        cut = content.rindex("</think>") + len("</think>")
        traced["content"] = Traced(
            content,
            [
                Mark(0, cut, Source(index, role, "reasoning_content")),
                Mark(cut, len(content), Source(index, role, "content")),
            ],
        )
    return traced


def _turns(text: Traced) -> list[Turn]:
    """Neighbouring marks of one message, in the order of the rendering."""
    turns: list[Turn] = []
    for mark in text.marks:
        if turns and turns[-1].source.message == mark.source.message:
            turns[-1].marks.append(mark)
        else:
            turns.append(Turn(mark.source, [mark]))
    return turns


def _unmarked(text: Traced) -> str:
    """The rendering's characters that no message claims, runs parted by a zero character."""
    plain, position, parts = str.__str__(text), 0, []
    for mark in text.marks:
        parts.append(plain[position : mark.start])
        position = mark.end
    return "\0".join([*parts, plain[position:]])


def _squeezed(text: str) -> str:
    """The text without blanks, SentencePiece's visible one included."""
    return "".join(unicodedata.normalize("NFKC", text).replace("▁", " ").split())


def _without_tags(text: str) -> str:
    """Reasoning without its own tags, which a template may set anew."""
    return text.removeprefix("<think>").removesuffix("</think>").strip()


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for k, v in value.items() for s in (*_strings(k), *_strings(v))]
    return [s for v in value for s in _strings(v)] if isinstance(value, list) else []


def _appears(text: str, shown: set[str]) -> bool:
    """Whether `text` was rendered, as it is or escaped as JSON."""
    escaped = {json.dumps(text, ensure_ascii=a)[1:-1] for a in (True, False)}
    return any(form.strip() in piece for form in (text, *escaped) for piece in shown)
