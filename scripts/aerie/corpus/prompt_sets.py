"""Prompts that the served drafter is measured with: first turns of conversations as token ids."""

from pathlib import Path

from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.common.files import digest, read_json_lines
from aerie.config import Corpus, Source
from aerie.corpus.conversations import Conversation, conversations
from aerie.corpus.messages import Message
from aerie.corpus.report import Tally


def first_turn(conversation: Conversation) -> list[Message]:
    """The messages up to the first user turn."""
    messages = conversation["messages"]
    end = next(i for i, m in enumerate(messages) if m["role"] == "user")
    return messages[: end + 1]


def encode_prompts(
    records: list[Conversation], template: ChatTemplate, limit: int, room: int
) -> list[list[int]]:
    """Token ids of the first turns of up to `limit` conversations that fit into `room` tokens.

    They are chosen by content hash, so the order of the corpus does not matter.
    """
    chosen = sorted(records, key=lambda c: digest("evaluation", c["id"]))
    prompts = []
    for conversation in chosen:
        ids = template.prompt_ids(first_turn(conversation), conversation.get("tools"))
        if len(ids) <= room:
            prompts.append(ids)
        if len(prompts) == limit:
            break
    return prompts


def read_heldout(path: Path) -> list[Conversation]:
    """The held-out conversations; raises `InputError` when there is none."""
    found = list(read_json_lines(path))
    if not found:
        raise InputError(f"{path}: has no held-out prompts to measure with; add prompts")
    return found


def read_prompt_file(path: Path) -> list[Conversation]:
    """The distinct prompts of a benchmark file in any layout of docs/corpus.md."""
    source, tally = Source(path=str(path)), Tally(path=str(path))
    found = conversations(source, path.stem, Corpus(), "generate", tally)
    distinct = list({c.conversation["id"]: c.conversation for c in found}.values())
    if not distinct:
        raise InputError(f"{path}: has no usable prompt ({tally.records_in} records read)")
    return distinct
