"""Prompts that are put to the served drafter: token ids of each conversation's first turn."""

from pathlib import Path
from typing import Any

from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.common.files import digest, read_json_lines


def first_turn(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages up to the first user turn."""
    messages = record["messages"]
    end = next(i for i, m in enumerate(messages) if m["role"] == "user")
    return messages[: end + 1]


def encode_prompts(
    records: list[dict[str, Any]], template: ChatTemplate, limit: int, room: int
) -> list[list[int]]:
    """Token ids of the first `limit` records' first turns that fit into `room` tokens.

    The choice is by content hash, so it does not depend on the corpus's order.
    """
    chosen = sorted(records, key=lambda r: digest("evaluation", r["id"]))
    prompts = []
    for record in chosen:
        ids = template.prompt_ids(first_turn(record), record.get("tools"))
        if len(ids) <= room:
            prompts.append(ids)
        if len(prompts) == limit:
            break
    return prompts


def read_heldout(path: Path) -> list[dict[str, Any]]:
    records = list(read_json_lines(path))
    if not records:
        raise InputError(f"{path}: holds no held-out prompts to measure with")
    return records


def read_prompt_file(path: Path) -> list[dict[str, Any]]:
    """Records of a benchmark prompt file in any layout of docs/corpus.md."""
    from aerie.config import Corpus, Source
    from aerie.corpus.layouts import Tally, conversations

    source, tally = Source(path=str(path)), Tally(str(path))
    found = conversations(source, path.stem, Corpus(), "generate", tally)
    records = list({c.record["id"]: c.record for c in found}.values())
    if not records:
        raise InputError(f"{path}: holds no prompt ({tally.records_in} records read)")
    return records
