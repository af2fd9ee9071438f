"""Layouts of records, and how a record's layout is found.

A layout is a function from a record to its turns, or to None when the record has another layout,
and a line in `LAYOUTS`. docs/corpus.md has the table.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from aerie.corpus.turns import (
    Turn,
    as_rows,
    assistant,
    first_of,
    get,
    is_missing,
    list_in,
    role_of,
    transcript_turns,
    turn_list,
    turns_in,
    user,
)
from aerie.corpus.unusable import Unusable, wrong_type


def bare_string(record: Any) -> list[Turn] | None:
    return [user(record)] if isinstance(record, str) else None


def bare_list(record: Any) -> list[Turn] | None:
    if isinstance(record, list) and record and all(isinstance(t, dict) for t in record):
        return turn_list(record)
    return None


def message_tree(record: Any) -> list[Turn] | None:
    """OASST: a prompt with a tree of replies; the best-ranked ones are used."""
    node = get(record, "prompt")
    if not (isinstance(node, dict) and "text" in node and "replies" in node):
        return None
    turns = []
    while node is not None:
        turns.append({"role": node.get("role"), "content": node.get("text")})
        replies = node.get("replies") or []
        if not isinstance(replies, list) or not all(isinstance(r, dict) for r in replies):
            raise wrong_type("replies", replies, "a list of objects")
        replies = [r for r in replies if not r.get("deleted")]
        node = min(replies, key=_rank, default=None)
    return turns


def _rank(reply: dict[str, Any]) -> float:
    rank = reply.get("rank")
    return rank if isinstance(rank, int | float) and rank == rank else math.inf


def flat_tree(record: Any) -> list[Turn] | None:
    """OASST with one message per row: only a tree's first prompt is complete."""
    if any(get(record, key) is None for key in ("message_id", "role", "text")):
        return None
    if record.get("parent_id") is not None:
        raise Unusable("reply of a message tree", "only the first prompt of a flat tree is used")
    return [{"role": record["role"], "content": record["text"]}]


def preference(record: Any) -> list[Turn] | None:
    """`chosen` and `rejected`: text, a turn, or turns with or without the prompt."""
    if not isinstance(record, dict) or "rejected" not in record:
        return None
    chosen = record.get("chosen")
    if isinstance(chosen, str) and get(record, "prompt") is None:
        turns = transcript_turns(chosen)
        if turns is not None:
            return turns
    if isinstance(chosen, list) and chosen and role_of(chosen[0]) not in ("assistant", "call"):
        return turn_list(chosen)
    rest = {key: value for key, value in record.items() if key not in ("chosen", "rejected")}
    before = find_layout(rest)[1]
    while before and role_of(before[-1]) == "assistant":
        before.pop()
    if isinstance(chosen, list | dict):
        return before + turn_list(chosen if isinstance(chosen, list) else [chosen])
    return [*before, assistant(chosen)]


TURN_LISTS = (
    "messages", "conversations", "conversation", "history", "turns", "dialogue", "dialog",
    "utterances",
)  # fmt: skip


def message_list(record: Any) -> list[Turn] | None:
    """ShareGPT, OpenAI messages, speaker/utterance dialogues, user/bot pairs: a list of turns."""
    for key in TURN_LISTS:
        value = list_in(get(record, key))
        if isinstance(value, dict):  # `datasets` gives a list of objects as a table of columns
            value = as_rows(value)
        if isinstance(value, list) and not (value and isinstance(value[0], str)):
            return turn_list(value) + following(record, key)
    return None


def following(record: dict[str, Any], key: str) -> list[Turn]:
    """The exchange after a `history`, when the record has one."""
    if key != "history" or get(record, "instruction") is None:
        return []
    return instruction({k: v for k, v in record.items() if k != "history"}) or []


def user_turns(record: Any) -> list[Turn] | None:
    """Benchmarks: `turns` of strings, each a user turn without an answer."""
    value = list_in(get(record, "turns"))
    if not isinstance(value, list) or not value:
        return None
    return [turn for text in value for turn in (user(text), assistant(None))]


def alternating(record: Any) -> list[Turn] | None:
    """UltraChat: `data` (or `dialog`, …) of strings, user and assistant alternating."""
    for key in ("data", "dialog", "dialogue", "conversation", "conversations", "utterances"):
        value = get(record, key)
        if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
            return [assistant(v) if i % 2 else user(v) for i, v in enumerate(value)]
    return None


def instances(record: Any) -> list[Turn] | None:
    """Self-instruct: an instruction with nested `instances`; the first is used."""
    nested = get(record, "instances")
    if get(record, "instruction") is None or not isinstance(nested, list):
        return None
    if not nested or not isinstance(nested[0], dict):
        raise wrong_type("instances", nested, "a list of objects")
    return instruction({**nested[0], "instruction": record["instruction"]})


def instruction(record: Any) -> list[Turn] | None:
    """Alpaca and Dolly: `instruction`, `input` or `context`, `output` or `response`."""
    if get(record, "instruction") is None:
        return None
    if not is_missing(before := get(record, "history")) and before != []:
        raise wrong_type("history", before, "a list of pairs or of turns")
    extra = first_of(record, "input", "context")
    return [user(two_parts(record["instruction"], extra)), *answer(record)]


def question(record: Any) -> list[Turn] | None:
    """`question`, `query` or `problem`, with an answer or without."""
    asked = first_of(record, "question", "query", "problem")
    if asked is None:
        return None
    return [user(two_parts(first_of(record, "context"), asked)), *answer(record)]


def prompt(record: Any) -> list[Turn] | None:
    """`prompt` as text or as turns, with an answer or without."""
    value = turns_in(get(record, "prompt"))
    if value is None:
        return None
    if not isinstance(value, list):
        return [user(value), *answer(record)]
    completion = get(record, "completion")
    return turn_list(value) + (
        turn_list(completion) if isinstance(completion, list) else answer(record)
    )


def transcript(record: Any) -> list[Turn] | None:
    """`text` with a whole conversation and the speakers' names in it."""
    text = get(record, "text")
    return transcript_turns(text) if isinstance(text, str) else None


LAYOUTS: dict[str, Callable[[Any], list[Turn] | None]] = {
    "bare string": bare_string,
    "bare list of messages": bare_list,
    "message tree (prompt/replies)": message_tree,
    "flat message tree (message_id/text/role)": flat_tree,
    "preference pair (chosen/rejected)": preference,
    "list of turns (messages, conversations, history, dialogue)": message_list,
    "user turns (turns)": user_turns,
    "alternating strings (data)": alternating,
    "nested instances (instruction/instances)": instances,
    "instruction (instruction/input/output)": instruction,
    "question (question/answer)": question,
    "prompt (prompt/completion)": prompt,
    "transcript (text)": transcript,
}
"""Name → layout, tried in this order; the first that fits is used."""


def find_layout(record: Any) -> tuple[str, list[Turn]]:
    """Name of the layout and the record's turns as given; raises `Unusable` when none fits."""
    for name, layout in LAYOUTS.items():
        turns = layout(record)
        if turns is not None:
            return name, turns
    if isinstance(record, dict):
        keys = ", ".join(f"{key} ({type(value).__name__})" for key, value in record.items())
        found = f"the keys {keys[:200]}" if keys else "no key with a value"
    else:
        found = f"{type(record).__name__} {json.dumps(record, default=str)[:60]}"
    raise Unusable(
        "unknown layout",
        f"found {found}",
        "on_bad_record",
        f"Expected one of: {'; '.join(LAYOUTS)}. Or name the key that holds the prompt as the "
        "source's column: corpus.sources: [{path: …, column: …}] (docs/corpus.md). ",
    )


ANSWERS = ("output", "response", "answer", "completion", "solution")


def answer(record: Any) -> list[Turn]:
    """The record's answer as a turn, or no turn; of several answers the first."""
    found = first_of(record, *ANSWERS)
    if isinstance(found, list) and found:
        found = found[0]
    return [assistant(found)] if isinstance(found, str) else []


def two_parts(first: Any, second: Any) -> Any:
    """Both texts with a blank line between; an empty or missing part is omitted."""
    parts = [part for part in (first, second) if not is_missing(part)]
    for part in parts:
        if not isinstance(part, str):
            raise wrong_type("part of the prompt", part, "text")
    return "\n\n".join(parts)
