"""What a chat template drops of a conversation."""

import json
from typing import Any

from aerie.chat.messages import Message, plain_messages, trace_message
from aerie.chat.tracing import Traced, plain_text

FIELDS = ("system", "tools", "content", "reasoning_content", "tool_calls")
"""Names of what can be dropped."""


def find_dropped_fields(
    rendered: Traced, messages: list[Message], tools: list[Any] | None
) -> list[str]:
    """Those of `FIELDS` that were given and are not in the rendering of the conversation."""
    shown: dict[tuple[int, str], set[str]] = {}
    length: dict[tuple[int, str], int] = {}
    plain = plain_text(rendered)
    for mark in rendered.marks:
        key = mark.source.message, mark.source.field
        shown.setdefault(key, set()).add(plain[mark.start : mark.end])
        length[key] = length.get(key, 0) + mark.end - mark.start
    dropped = set()
    if tools and (-1, "tools") not in shown:
        dropped.add("tools")
    for i, message in enumerate(plain_messages(messages)):
        traced = trace_message(i, message)
        for field in ("content", "reasoning_content"):
            for mark in getattr(traced.get(field), "marks", ()):
                key = i, mark.source.field
                text = traced[field][mark.start : mark.end].strip()
                if text and length.get(key, 0) < len(_without_tags(text)):
                    system = message["role"] in ("system", "developer")
                    dropped.add("system" if system else mark.source.field)
        for call in message.get("tool_calls") or ():
            texts = shown.get((i, "tool_calls"), set())
            function = call["function"]
            wanted = _strings([function.get("name"), function.get("arguments")])
            if any(w.strip() and not _appears(w, texts) for w in wanted):
                dropped.add("tool_calls")
    return [name for name in FIELDS if name in dropped]


def _without_tags(text: str) -> str:
    """Reasoning without its own tags, which a template may write itself."""
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
