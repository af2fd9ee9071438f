"""Messages as a template gets them: in one form, with traced text."""

import json
from typing import Any

from aerie.chat.tracing import Mark, Origin, Traced, trace
from aerie.chat.unverified import Unverified

Message = dict[str, Any]

WRITTEN = ("content", "reasoning_content", "tool_calls")
"""Fields of an assistant's message that hold text it wrote."""


def plain_messages(messages: list[Message]) -> list[Message]:
    """Messages with call arguments as objects, without absent fields, with text as content.

    Raises `Unverified` when call arguments are not valid JSON.
    """
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


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise Unverified("tool call arguments are not valid JSON") from None
    return {**call, "function": function}


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Plain messages with call arguments as JSON text."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"].get("arguments", {}), ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def trace_message(index: int, message: Message) -> Message:
    """The message with traced text; reasoning inside the content counts as reasoning."""
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
                Mark(0, cut, Origin(index, role, "reasoning_content")),
                Mark(cut, len(content), Origin(index, role, "content")),
            ],
        )
    return traced
