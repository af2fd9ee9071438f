"""What a tokenizer and its template do, found with small conversations."""

import re
from dataclasses import dataclass
from typing import Any

from aerie.chat.codec import Codec
from aerie.chat.controls import Controls
from aerie.chat.encoding import FastEncoder
from aerie.chat.rendering import Renderer
from aerie.chat.tracing import FIXED_DATE, plain_text
from aerie.chat.unverified import Unverified
from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.versions import TEMPLATE_VERSION


@dataclass
class AddedToken:
    """A token that was added to the tokenizer's vocabulary."""

    id: int
    special: bool


@dataclass
class TurnMarkup:
    """What the template writes around turns."""

    controls: Controls
    eos_ids: frozenset[int]
    """Tokens that end an assistant's turn."""
    openings: list[str]
    """Beginnings of the generation prompt that may stand before an answer, longest first."""
    opener_ids: set[int]
    """Control tokens of the generation prompt that end no turn."""
    user_tail: str
    """Of a template without a generation prompt: what ends a user's turn."""


def added_tokens(tokenizer: Any) -> dict[str, AddedToken]:
    """Added tokens by text."""
    return {
        str(token): AddedToken(token_id, bool(token.special))
        for token_id, token in tokenizer.added_tokens_decoder.items()
    }


def probe_turns(tokenizer: Any, template: str, eos_ids: frozenset[int]) -> TurnMarkup:
    """Find what the template writes around turns.

    `eos_ids`: the tokens that are declared to end a turn; the one that the template writes after
    an assistant's text is added. Raises `InputError` when the template does not render a plain
    conversation.
    """
    added = added_tokens(tokenizer)
    # Until the turns are known, every added token may belong to them.
    all_added = Controls({text: token.id for text, token in added.items()}, {})
    renderer = Renderer(tokenizer, template, all_added)
    user = {"role": "user", "content": "u"}
    answer = {"role": "assistant", "content": "a"}
    generation = user_tail = ""
    try:
        before = renderer.render([user], None, False)
        prompt = plain_text(renderer.render([user], None, True))
        whole = renderer.render([user, answer, user, answer], None, False)
    except Unverified as error:
        raise InputError(
            f"the chat template does not render a plain conversation: {error.reason}"
        ) from error
    if prompt.startswith(plain_text(before)):
        generation = prompt[len(before) :]
    answers = [m for m in whole.marks if m.source.role == "assistant"]
    controls = _find_controls(added, plain_text(whole) + prompt, template)
    if answers:
        ends, _ = controls.find(whole.cut(answers[-1].end, len(whole)))
        if ends:
            eos_ids |= {ends[0].id}
    if not generation and len(answers) == 2:
        # A template without a generation prompt: what it writes between turns precedes the
        # answer, except for what ends the user's turn.
        tail = plain_text(before)[before.marks[-1].end :] if before.marks else ""
        users = [m.end for m in whole.marks if m.end <= answers[0].start]
        header = plain_text(whole)[max(users, default=0) : answers[0].start]
        if header.startswith(tail):
            generation = header[len(tail) :].strip(" ")
            user_tail = tail
    inside = controls.find_plain(generation)
    lines = [m.end() for m in re.finditer("\n", generation)]
    stops = {len(generation), *(c.end for c in inside), *lines} - {0}
    openings = [generation[:end] for end in sorted(stops, reverse=True) if generation[:end].strip()]
    return TurnMarkup(controls, eos_ids, openings, {c.id for c in inside} - eos_ids, user_tail)


def _find_controls(added: dict[str, AddedToken], around: str, template: str) -> Controls:
    """Control tokens among the added ones; `around`: a rendering of turns without text."""
    special, markup = {}, {}
    for text, token in added.items():
        # Tags in pairs (<think>) and blanks are ordinary vocabulary; other tokens around turns
        # steer the model, whether or not they are declared special.
        paired = f"</{text[1:]}" in added or f"<{text[2:]}" in added
        if token.special or (text in around and text.strip() and not paired):
            special[text] = token.id
        elif text in template and text.strip():
            markup[text] = token.id
    return Controls(special, markup)


def fingerprint(tokenizer: Any, template: str, codec: Codec, eos_ids: frozenset[int]) -> str:
    """Hash of the tokenizer's behaviour, the template, `eos_ids` and the fixed date."""
    if isinstance(codec.encoder, FastEncoder):
        behaviour: Any = codec.encoder.data
    else:
        behaviour = [
            type(tokenizer).__name__,
            tokenizer.get_vocab(),
            codec.encoder.text_ids("The 12 quick\n\n  brown föxes 🙂, isn't it?"),
        ]
    added = sorted((t.id, text, t.special) for text, t in added_tokens(tokenizer).items())
    return digest(
        TEMPLATE_VERSION,
        behaviour,
        added,
        template,
        tokenizer.special_tokens_map,
        codec.bos_id,
        sorted(eos_ids),
        FIXED_DATE.isoformat(),
    )
