"""The turns of a record, as layouts build them: speaker, text, lists of turns."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from aerie.corpus.unusable import wrong_type

Turn = dict[str, Any]
"""`role`, `content` and other keys, with the record's own values."""


ROLES: dict[str, str] = {
    **dict.fromkeys(["user", "human", "prompter"], "user"),
    **dict.fromkeys(["assistant", "gpt", "chatgpt", "bot", "chatbot", "model"], "assistant"),
    **dict.fromkeys(["bing", "bard"], "assistant"),
    **dict.fromkeys(["system", "developer"], "system"),
    **dict.fromkeys(["tool", "observation", "function", "ipython"], "tool"),
    **dict.fromkeys(["tool_response", "function_response"], "tool"),
    **dict.fromkeys(["function_call", "tool_call"], "call"),
}
"""Role names in lower case → role; `call` is an assistant turn whose text is a tool call."""


def role_of(turn: Any, more: Mapping[str, str] | None = None) -> str | None:
    """`system`, `user`, `assistant`, `tool` or `call`; None for an unknown role."""
    name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    if not isinstance(name, str):
        return None
    if more and name in more:
        return more[name]
    return ROLES.get(name.strip().lower())


def user(content: Any) -> Turn:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Turn:
    return {"role": "assistant", "content": content}


def get(record: Any, key: str) -> Any:
    """`record[key]`, or None when `record` is not an object or lacks the key."""
    return record.get(key) if isinstance(record, dict) else None


def first_of(record: Any, *keys: str) -> Any:
    """The value of the first of these keys that is not null."""
    if isinstance(record, dict):
        for key in keys:
            if record.get(key) is not None:
                return record[key]
    return None


def is_missing(value: Any) -> bool:
    """Whether a cell is empty; pandas writes NaN for an empty cell."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def is_turn(value: Any) -> bool:
    """Whether a JSON value is a turn of a conversation rather than a whole record."""
    return isinstance(value, dict) and (
        ("role" in value and ("content" in value or "tool_calls" in value))
        or ("from" in value and "value" in value)
    )


def list_in(value: Any) -> Any:
    """`value`, or the list in it when it is JSON text (as in cells of a table)."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return inner if isinstance(inner, list) else value
    return value


def turns_in(value: Any) -> Any:
    """As `list_in`, for text that may also be a prompt: only a list of turns counts."""
    inner = list_in(value)
    return inner if isinstance(inner, list) and inner and is_turn(inner[0]) else value


def as_rows(columns: dict[str, Any]) -> list[dict[str, Any]] | None:
    """A table of columns as a list of objects; None when the columns do not match."""
    lists = [v for v in columns.values() if isinstance(v, list)]
    if not lists or len(lists) < len(columns) or len({len(v) for v in lists}) > 1:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


ROLE_KEYS = ("role", "from", "speaker")


TEXT_KEYS = ("content", "value", "utterance", "text")


PAIR_KEYS = {"user": "user", "human": "user", "bot": "assistant", "assistant": "assistant"}


def turn_list(turns: list[Any]) -> list[Turn]:
    """Turns with the keys `role` and `content`, whatever the record calls them.

    Raises `Unusable` when an element is not a turn.
    """
    found: list[Turn] = []
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, list | tuple) and len(turn) == 2:
            found += [user(turn[0]), assistant(turn[1])]
            continue
        if not isinstance(turn, dict):
            raise wrong_type(f"turn {number}", turn, "an object such as {role, content}")
        role, text = first_key(turn, ROLE_KEYS), first_key(turn, TEXT_KEYS)
        if role is None and not PAIR_KEYS.keys().isdisjoint(turn):
            found += [{"role": PAIR_KEYS[k], "content": turn[k]} for k in turn if k in PAIR_KEYS]
            continue
        if role is None or (text is None and not calls_of(turn)):
            raise wrong_type(f"turn {number}", turn, "role and content, or from and value")
        rest = {k: v for k, v in turn.items() if k not in (role, text)}
        name = turn[role]
        if (role == "speaker" or text == "utterance") and str(name).lower() == "system":
            name = "assistant"  # in task dialogues the system answers
        found.append({**rest, "role": name, "content": turn[text] if text else None})
    return found


def first_key(turn: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    for key in keys:
        if key in turn:
            return key
    return None


def calls_of(turn: Turn) -> Any:
    """A turn's tool calls as given."""
    return first_of(turn, "tool_calls", "function_call")


TRANSCRIPTS = [
    re.compile(r"(?:^|\n\n)(Human|Assistant):"),
    re.compile(r"(?:^|\s*)### ?(Human|Assistant):"),
    re.compile(r"(?:^|(?<=\s))(USER|ASSISTANT):"),
]


def transcript_turns(text: str) -> list[Turn] | None:
    """The turns of a text with the speakers' names in it; None when it has none."""
    for pattern in TRANSCRIPTS:
        head, *rest = pattern.split(text)
        if len(rest) >= 2:
            turns = [
                {"role": name, "content": said.strip()}
                for name, said in zip(rest[::2], rest[1::2], strict=True)
            ]
            system = [{"role": "system", "content": head.strip()}] if head.strip() else []
            return system + turns
    return None
