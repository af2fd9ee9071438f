"""Turns to messages: roles, content, reasoning, tool calls and tools in one form."""

import json
from collections.abc import Mapping
from typing import Any

from aerie.corpus.turns import ROLES, Turn, calls_of, first_of, is_missing, role_of
from aerie.corpus.unusable import Unusable, wrong_type

Message = dict[str, Any]
"""`role`, `content` and, where given, `reasoning_content`, `tool_calls`, `name`, `tool_call_id`."""


MAX_DEPTH = 64
"""Deepest nesting of tools and tool call arguments."""


def to_message(turn: Turn, number: int, roles: Mapping[str, str] | None) -> Message:
    """The message of turn `number` of a record (from 1); raises `Unusable`."""
    role = role_of(turn, roles)
    if role is None:
        raise Unusable(
            "unknown role",
            f"turn {number} has the role {str(turn.get('role'))[:60]!r}",
            "on_unknown_role",
            f"Known roles: {', '.join(ROLES)}. If it is one of these under another name, add it: "
            "corpus.roles: {NAME: ROLE}. ",
        )
    text, reasoning, calls = to_text(turn.get("content"), role, number)
    if role == "call":
        role, text, calls = "assistant", "", to_calls(text, number)
    message: Message = {"role": role, "content": text}
    if role == "assistant":
        given = first_of(turn, "reasoning_content", "reasoning", "thinking")
        if isinstance(given, dict | list) and given:
            raise wrong_type(f"reasoning of turn {number}", given, "text")
        reasoning = given if isinstance(given, str) and given else reasoning
        if reasoning.strip():
            message["reasoning_content"] = reasoning
        calls = calls + to_calls(calls_of(turn), number)
        if calls:
            message["tool_calls"] = calls
    elif reasoning or calls or calls_of(turn):
        raise wrong_type(f"turn {number} ({role})", turn, "text only")
    if role == "tool":
        for key in ("name", "tool_call_id"):
            if isinstance(turn.get(key), str) and turn[key]:
                message[key] = turn[key]
    return message


def to_text(content: Any, role: str, number: int) -> tuple[str, str, list[Any]]:
    """Text, reasoning and tool calls of a turn's content (text, a part or a list of parts)."""
    if is_missing(content):
        return "", "", []
    if isinstance(content, str):
        return content, "", []
    if isinstance(content, dict):
        if role in ("tool", "call") and "type" not in content:
            return json.dumps(content, ensure_ascii=False), "", []
        content = [content]
    if not isinstance(content, list):
        raise wrong_type(f"content of turn {number}", content, "text or a list of parts")
    text, reasoning, calls = [], [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        value = part if isinstance(part, str) else first_of(part, "text", "value", "content")
        if kind in ("tool_call", "function_call"):
            calls += to_calls(first_of(part, "value", "tool_call", "function") or part, number)
        elif kind in ("reasoning", "thinking"):
            reasoning.append(first_of(part, "value", "text", "thinking", "reasoning"))
        elif kind in (None, "text", "input_text", "output_text") and isinstance(value, str):
            text.append(value)
        elif role == "tool" and kind is None:
            text.append(json.dumps(part, ensure_ascii=False))
        elif kind is not None:
            raise Unusable("not text", f"turn {number} has a part of type {str(kind)[:40]!r}")
        else:
            raise wrong_type(f"part of turn {number}", part, "text")
    if not all(isinstance(part, str) for part in reasoning):
        raise wrong_type(f"reasoning of turn {number}", reasoning, "text")
    return "".join(text), "".join(reasoning), calls


def to_calls(given: Any, number: int) -> list[dict[str, Any]]:
    """Tool calls in one form: `{"type": "function", "function": {"name", "arguments": {…}}}`."""
    if is_missing(given):
        return []
    given = from_json(given, f"the tool call of turn {number}", "malformed tool call") or []
    calls = []
    for call in given if isinstance(given, list) else [given]:
        call = from_json(call, f"the tool call of turn {number}", "malformed tool call")
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise Unusable(
                "malformed tool call",
                f"turn {number}: a call without a name: {str(call)[:80]}",
            )
        arguments = function.get("arguments", function.get("parameters"))
        arguments = {} if is_missing(arguments) else arguments
        where = f"the arguments of {name[:40]!r} in turn {number}"
        arguments = from_json(arguments, where, "malformed tool call")
        if not isinstance(arguments, dict):
            raise Unusable("malformed tool call", f"{where}: not an object")
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        normal = {"name": name, "arguments": arguments}
        calls.append({**identity, "type": "function", "function": normal})
    return calls


def to_tools(given: Any) -> list[dict[str, Any]]:
    """Tools in one form: `{"type": "function", "function": {name, …}}`."""
    if is_missing(given):
        return []
    given = from_json(given, "tools", "malformed tools") or []
    tools = []
    for tool in given if isinstance(given, list) else [given]:
        tool = from_json(tool, "a tool", "malformed tools")
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable("malformed tools", f"a tool without a name: {str(tool)[:80]}")
        tools.append({"type": "function", "function": function})
    return tools


def from_json(value: Any, what: str, reason: str) -> Any:
    """`value`, parsed when it is text; depth and NaN, which JSON does not have, are checked."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, dict | list):
            if depth(value) > MAX_DEPTH:
                raise Unusable(reason, f"{what}: nested deeper than {MAX_DEPTH}")
            json.dumps(value, allow_nan=False)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at column {error.colno}"
        raise Unusable(reason, f"{what}: not JSON: {where}: {value[:80]!r}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise Unusable(reason, f"{what}: not JSON: {error}") from None
    return value


def depth(value: Any) -> int:
    """Levels of nesting, counted without recursion and not far beyond `MAX_DEPTH`."""
    level, found = [value], 0
    while level and found <= MAX_DEPTH:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        found += 1
    return found
