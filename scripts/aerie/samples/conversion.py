"""Conversations and answers as tokenized samples with their loss masks."""

from typing import Any

from aerie.chat.template import ChatTemplate
from aerie.chat.unverified import Unverified
from aerie.config import Samples
from aerie.samples.file import TokenizedSample
from aerie.samples.stored_answer import StoredAnswer


class Dropped(Exception):
    """A record that yields no sample; the message is the reason under which it is counted."""


def samples_of_answer(
    record: dict[str, Any], split: str, answer: StoredAnswer, settings: Samples
) -> list[TokenizedSample]:
    """Samples of a record that the verifier answered; raises `Dropped` if there are none."""
    if answer.dropped:
        raise Dropped(answer.dropped)
    kept = []
    for number, tokens in enumerate(answer.samples):
        mask = [False] * len(tokens.ids)
        for start, end in tokens.spans:
            mask[start:end] = [True] * (end - start)
        if sum(mask[:-1]) < settings.min_supervised_tokens:
            continue
        kept.append(
            TokenizedSample(
                id=record["id"] if number == 0 else f"{record['id']}-{number}",
                record=record["id"],
                source=record["source"],
                split=split,
                input_ids=tokens.ids[:-1],
                loss_mask=mask[:-1],
                last_turn=tokens.spans[-1][0],
                next_token=tokens.ids[-1],
            )
        )
    if not kept:
        raise Dropped("too few supervised tokens")
    return kept


def sample_of_conversation(
    record: dict[str, Any], split: str, template: ChatTemplate, settings: Samples
) -> TokenizedSample:
    """The sample of a conversation with its own answers (`generation.mode: keep`), cut at
    `max_length`. Raises `Dropped` with the reason if it yields none."""
    try:
        masked = template.mask(
            record["messages"], record.get("tools"), settings.supervise_reasoning
        )
    except Unverified as error:
        raise Dropped(f"loss mask not verified: {error}") from None
    end = settings.max_length
    ids, mask = list(masked.input_ids[:end]), [bool(m) for m in masked.loss_mask[:end]]
    if not any(mask):
        raise Dropped("prompt fills the window")
    if sum(mask) < settings.min_supervised_tokens:
        raise Dropped("too few supervised tokens")
    last_turn = masked.last_turn
    if last_turn >= len(ids):
        last_turn = max(i for i in range(len(ids)) if mask[i] and (i == 0 or not mask[i - 1]))
    return TokenizedSample(
        id=record["id"],
        record=record["id"],
        source=record["source"],
        split=split,
        input_ids=ids,
        loss_mask=mask,
        last_turn=last_turn,
        next_token=masked.input_ids[end] if len(masked.input_ids) > end else -1,
    )
