"""Records in any common layout → conversations with checked roles, and the rules for odd turns.

A layout is one small function in `LAYOUTS`; docs/corpus.md has the tables and the rules.
"""

import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.config import Corpus, Source
from aerie.corpus.reading import (
    Meter,
    Record,
    expand,
    is_saved_dataset,
    is_turn,
    read_dataset,
    read_records,
)

Turn = dict[str, Any]
"""`role`, `content` and what else the record gives, as in the record."""

ROLES = {
    **dict.fromkeys(["user", "human", "prompter"], "user"),
    **dict.fromkeys(["assistant", "gpt", "chatgpt", "bot", "chatbot", "model"], "assistant"),
    **dict.fromkeys(["bing", "bard"], "assistant"),
    **dict.fromkeys(["system", "developer"], "system"),
    **dict.fromkeys(["tool", "observation", "function", "ipython"], "tool"),
    **dict.fromkeys(["tool_response", "function_response"], "tool"),
    **dict.fromkeys(["function_call", "tool_call"], "call"),
}
"""Role names, in small letters → role; `call` is an assistant turn whose text is a tool call."""

PROMPT_FILES = ("train.jsonl.zst", "heldout.jsonl.zst", "report.json")
"""What a run makes of its sources, in one folder."""

MAX_DEPTH = 64
"""Deepest nesting of tools and tool call arguments."""


class Unusable(Exception):
    """A record that is not used: `reason` is counted, `detail` is shown in examples.

    `policy` names the key of the configuration that decides whether the run stops
    (`on_bad_record`, `on_unknown_role`), `hint` says what to do then; without a policy the
    record is dropped.
    """

    def __init__(
        self, reason: str, detail: str = "", policy: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.policy, self.hint = reason, detail, policy, hint


def wrong_type(what: str, found: Any, expected: str) -> Unusable:
    shown = json.dumps(found, default=str, ensure_ascii=True)[:80]
    detail = f"{what} is {type(found).__name__} {shown}; expected {expected}"
    return Unusable("wrong type", detail, "on_bad_record")


# Layouts: record → turns, or None when the record has another layout.


def bare_string(record: Any) -> list[Turn] | None:
    return [user(record)] if isinstance(record, str) else None


def bare_list(record: Any) -> list[Turn] | None:
    if isinstance(record, list) and record and all(isinstance(t, dict) for t in record):
        return turn_list(record)
    return None


def message_tree(record: Any) -> list[Turn] | None:
    """OASST: a prompt with replies; the best-ranked reply is followed."""
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
    """OASST with one message a row: only a tree's first prompt stands on its own."""
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


def message_list(record: Any) -> list[Turn] | None:
    """ShareGPT, OpenAI messages, speaker/utterance dialogues, user/bot pairs: a list of turns."""
    for key in TURN_LISTS:
        value = list_in(get(record, key))
        if isinstance(value, dict):  # a table of columns, as `datasets` gives lists of objects
            value = as_rows(value)
        if isinstance(value, list) and not (value and isinstance(value[0], str)):
            return turn_list(value) + following(record, key)
    return None


def following(record: dict[str, Any], key: str) -> list[Turn]:
    """The exchange that comes after a `history`, when the record has one."""
    if key != "history" or get(record, "instruction") is None:
        return []
    return instruction({k: v for k, v in record.items() if k != "history"}) or []


TURN_LISTS = ("messages", "conversations", "conversation", "history", "turns")
TURN_LISTS += ("dialogue", "dialog", "utterances")


def user_turns(record: Any) -> list[Turn] | None:
    """Benchmarks: `turns` of strings, each a user turn that waits for its answer."""
    value = list_in(get(record, "turns"))
    if not isinstance(value, list) or not value:
        return None
    return [turn for text in value for turn in (user(text), assistant(None))]


def alternating(record: Any) -> list[Turn] | None:
    """UltraChat: `data` (or `dialog`, …) of strings, user and assistant by turns."""
    for key in ("data", "dialog", "dialogue", "conversation", "conversations", "utterances"):
        value = get(record, key)
        if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
            return [assistant(v) if i % 2 else user(v) for i, v in enumerate(value)]
    return None


def instances(record: Any) -> list[Turn] | None:
    """Self-instruct: an instruction with nested `instances`, of which the first is used."""
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
    """`text` that holds a whole conversation with the speakers' names in it."""
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
"""Tried in this order; the first that fits is used."""


def find_layout(record: Any) -> tuple[str, list[Turn]]:
    """Name of the layout and the record's turns as given; `Unusable` when no layout fits."""
    for name, layout in LAYOUTS.items():
        turns = layout(record)
        if turns is not None:
            return name, turns
    if isinstance(record, dict):
        keys = ", ".join(f"{key} ({type(value).__name__})" for key, value in record.items())
        found = f"the keys {keys[:200]}" if keys else "no key that holds something"
    else:
        found = f"{type(record).__name__} {json.dumps(record, default=str)[:60]}"
    raise Unusable(
        "unknown layout",
        f"found {found}",
        "on_bad_record",
        f"Expected one of: {'; '.join(LAYOUTS)}. Or name the key that holds the prompt: --source "
        '\'{"path": …, "column": …}\' (docs/corpus.md). ',
    )


# What layouts are made of.


def user(content: Any) -> Turn:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Turn:
    return {"role": "assistant", "content": content}


def get(record: Any, key: str) -> Any:
    """`record[key]`, or None when `record` is not an object or has not this key."""
    return record.get(key) if isinstance(record, dict) else None


def first_of(record: Any, *keys: str) -> Any:
    """The first of these keys that holds something."""
    if isinstance(record, dict):
        for key in keys:
            if record.get(key) is not None:
                return record[key]
    return None


ANSWERS = ("output", "response", "answer", "completion", "solution")


def answer(record: Any) -> list[Turn]:
    found = first_of(record, *ANSWERS)
    if isinstance(found, list) and found:
        found = found[0]
    return [assistant(found)] if isinstance(found, str) else []


def two_parts(first: Any, second: Any) -> Any:
    """Both texts, a blank line between; a part that is empty or missing is left out."""
    parts = [part for part in (first, second) if not is_missing(part)]
    for part in parts:
        if not isinstance(part, str):
            raise wrong_type("part of the prompt", part, "text")
    return "\n\n".join(parts)


def is_missing(value: Any) -> bool:
    """Whether a cell is empty, also the NaN that pandas writes for one."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def list_in(value: Any) -> Any:
    """`value`, or the list it holds as JSON text (as in cells of a table)."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return inner if isinstance(inner, list) else value
    return value


def turns_in(value: Any) -> Any:
    """Like `list_in`, for text that may also be a prompt: only a list of turns counts."""
    inner = list_in(value)
    return inner if isinstance(inner, list) and inner and is_turn(inner[0]) else value


def as_rows(columns: dict[str, Any]) -> Any:
    lists = [v for v in columns.values() if isinstance(v, list)]
    if not lists or len(lists) < len(columns) or len({len(v) for v in lists}) > 1:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


ROLE_KEYS = ("role", "from", "speaker")
TEXT_KEYS = ("content", "value", "utterance", "text")
PAIR_KEYS = {"user": "user", "human": "user", "bot": "assistant", "assistant": "assistant"}


def turn_list(turns: list[Any]) -> list[Turn]:
    """Turns with the keys `role` and `content`, whatever the record calls them."""
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
            name = "assistant"  # in task dialogues the system is the one who answers
        found.append({**rest, "role": name, "content": turn[text] if text else None})
    return found


def first_key(turn: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    for key in keys:
        if key in turn:
            return key
    return None


def calls_of(turn: Turn) -> Any:
    return first_of(turn, "tool_calls", "function_call")


TRANSCRIPTS = [
    re.compile(r"(?:^|\n\n)(Human|Assistant):"),
    re.compile(r"(?:^|\s*)### ?(Human|Assistant):"),
    re.compile(r"(?:^|(?<=\s))(USER|ASSISTANT):"),
]


def transcript_turns(text: str) -> list[Turn] | None:
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


# Turns as given → messages.


def role_of(turn: Any, more: dict[str, str] | None = None) -> str | None:
    """`system`, `user`, `assistant`, `tool` or `call`; None for an unknown role."""
    name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    if not isinstance(name, str):
        return None
    if more and name in more:
        return more[name]
    return ROLES.get(name.strip().lower())


OTHER_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}


def to_conversation(
    record: Any, roles: dict[str, str] | None = None, column: str | None = None
) -> tuple[str, list[dict[str, Any]], list[Any], list[str]]:
    """Layout, messages, tools and notes (what was left out) of a record.

    Raises `Unusable` with the reason when the record is not usable.
    """
    if column is not None:
        if not isinstance(record, dict) or column not in record:
            found = ", ".join(map(str, record)) if isinstance(record, dict) else record
            raise Unusable(
                "unknown layout",
                f"no column {column!r}; found {str(found)[:200]}",
                "on_bad_record",
            )
        value = turns_in(record[column])
        turns = turn_list(value) if isinstance(value, list) else [user(value)]
        layout = "column"
    else:
        layout, turns = find_layout(record)
    notes = []
    tools: list[Any] = []
    if isinstance(record, dict):
        for key in OTHER_MEDIA & record.keys():
            if record[key]:
                raise Unusable("not text", f"the record has {key!r}")
        tools = to_tools(first_of(record, "tools", "functions"))
        system = first_of(record, "system", "system_prompt")
        if not isinstance(system, str | None) and not is_missing(system):
            raise wrong_type("system", system, "text")
        if isinstance(system, str) and system.strip():
            given = [t.get("content") for t in turns if role_of(t) == "system"]
            if not given:
                turns = [{"role": "system", "content": system}, *turns]
            elif system not in given:
                notes.append("system text beside a system turn not used")
        if "rejected" in record:
            notes.append("rejected answer not used")
        if isinstance(record.get("instances"), list) and len(record["instances"]) > 1:
            notes.append("further instances not used")
        answers = [a for a in (record.get(key) for key in ANSWERS) if isinstance(a, list)]
        if any(len(a) > 1 and all(isinstance(text, str) for text in a) for a in answers):
            notes.append("further answers not used")
    messages = [to_message(turn, number, roles) for number, turn in enumerate(turns, 1)]
    return layout, messages, tools, notes


def to_message(turn: Turn, number: int, roles: dict[str, str] | None) -> dict[str, Any]:
    role = role_of(turn, roles)
    if role is None:
        raise Unusable(
            "unknown role",
            f"turn {number} has the role {str(turn.get('role'))[:60]!r}",
            "on_unknown_role",
            f"Known roles: {', '.join(ROLES)}. If it is one of these under another name, say so: "
            "--role NAME=ROLE (corpus.roles). ",
        )
    text, reasoning, calls = to_text(turn.get("content"), role, number)
    if role == "call":
        role, text, calls = "assistant", "", to_calls(text, number)
    message: dict[str, Any] = {"role": role, "content": text}
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
    """Text, reasoning and tool calls in a turn's content (text, a part or a list of parts)."""
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
        inner = call.get("function", call) if isinstance(call, dict) else None
        name = inner.get("name") if isinstance(inner, dict) else None
        if not isinstance(name, str) or not name:
            raise Unusable(
                "malformed tool call",
                f"turn {number}: a call without a name: {str(call)[:80]}",
            )
        arguments = inner.get("arguments", inner.get("parameters"))
        arguments = {} if is_missing(arguments) else arguments
        where = f"the arguments of {name[:40]!r} in turn {number}"
        arguments = from_json(arguments, where, "malformed tool call")
        if not isinstance(arguments, dict):
            raise Unusable("malformed tool call", f"{where}: not an object")
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        function = {"name": name, "arguments": arguments}
        calls.append({**identity, "type": "function", "function": function})
    return calls


def to_tools(given: Any) -> list[Any]:
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
    """`value`, parsed when it is text; checked for depth and for NaN, which JSON has not."""
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
    """Levels of nesting; counted without recursion, up to just above `MAX_DEPTH`."""
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


# Odd turns.


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Consecutive turns of one role made one.

    Texts are joined by a blank line, or directly where white space already stands at the seam.
    Tool results stay apart, and so do assistant turns whose order a template could not keep
    (text after a tool call, reasoning after text).
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {"role": None}
        apart = last["role"] != message["role"] or message["role"] == "tool"
        apart = apart or ("tool_calls" in last and not is_blank(message))
        if apart or (last["content"] and "reasoning_content" in message):
            found.append(message)
            continue
        merged = {**last, **message}
        for key in ("content", "reasoning_content"):
            if key in last and key in message:
                merged[key] = seam(last[key], message[key])
        if "tool_calls" in last and "tool_calls" in message:
            merged["tool_calls"] = last["tool_calls"] + message["tool_calls"]
        found[-1] = merged
    return found


def is_blank(message: dict[str, Any]) -> bool:
    return not message["content"] and "reasoning_content" not in message


def seam(first: str, second: str) -> str:
    if not first or not second or first[-1].isspace() or second[0].isspace():
        return first + second
    return f"{first}\n\n{second}"


def is_empty(message: dict[str, Any]) -> bool:
    return not message["content"].strip() and "tool_calls" not in message


def settle(messages: list[dict[str, Any]], mode: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages that are used in this mode (`generate` or `keep`), and notes on what changed.

    Raises `Unusable` when nothing is left. docs/corpus.md states the rules.
    """
    if not messages:
        raise Unusable("no messages")
    start = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if start is None:
        raise Unusable("no user turn")
    notes = []
    before = [m for m in messages[:start] if m["role"] == "system" and m["content"].strip()]
    if any(m["role"] != "system" for m in messages[:start]):
        notes.append("turns before the first user turn removed")
    given, messages = before + messages[start:], joined(before + messages[start:])
    if len(messages) < len(given):
        notes.append("consecutive turns of one role joined")
    used, cut = (_prompts if mode == "generate" else _exchanges)(messages)
    if cut and not any(m["role"] == "user" for m in used):
        raise Unusable(cut)
    if cut:
        notes.append(f"cut before: {cut}")
    if mode == "keep":
        answered = len(used)
        while answered and used[answered - 1]["role"] != "assistant":
            answered -= 1
        if not answered:
            raise Unusable("no assistant turn")
        if answered < len(used):
            notes.append("trailing turns without an answer removed")
        used = used[:answered]
    return used, notes


def _prompts(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """System and user turns up to the first that needs what only the record's answers give."""
    used: list[dict[str, Any]] = []
    exchange = 0  # where the present exchange starts in `used`
    for message in messages:
        role = message["role"]
        if role == "user" and is_empty(message):
            return used[:exchange], "empty user turn"
        if role == "tool" or "tool_calls" in message:
            return used, "tool call"
        if role == "system" and any(m["role"] == "user" for m in used):
            return used[:exchange], "system turn in the middle"
        if role == "assistant":
            exchange = len(used)
        else:
            used.append(message)
    return used, None


def _exchanges(
    messages: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], str | None]:
    """All turns up to the first exchange with an empty turn."""
    used: list[dict[str, Any]] = []
    exchange = 0
    for message in messages:
        if message["role"] == "user":
            exchange = len(used)
        if message["role"] in ("user", "assistant") and is_empty(message):
            what = "empty user turn" if message["role"] == "user" else "empty answer"
            return used[:exchange], what
        used.append(message)
    return used, None


# Sources.


def parse_source(text: str) -> dict[str, Any]:
    """A path as it is, or a JSON object with the keys of `corpus.sources`, as an argument."""
    if not text.lstrip().startswith("{"):
        return {"path": text}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"source {text[:200]!r}: not JSON ({error}); expected a path, or an object such as "
            '\'{"path": "data.csv", "column": "prompt", "limit": 1000}\''
        ) from None


def source_names(sources: list[Source]) -> list[str]:
    """A short, distinct name for each source: its own, or one made from the path."""
    names: list[str] = []
    for source in sources:
        name = printable(source.name or _short(source.path))
        same = [f"{name}-{n}" for n in range(2, len(sources) + 2)]
        names.append(next(n for n in [name, *same] if n not in names))
    return names


def _short(path: str) -> str:
    if path.startswith("hf:"):
        return path[3:].rstrip("/")[-60:]
    parts = [p for p in Path(path).parts if not re.search(r"[*?\[]", p)]
    stem = (parts[-1] if parts else "prompts").split(".")[0]
    return stem[:60] or "prompts"


class Tally:
    """What became of the records of one source: counts with reasons, three examples each."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.records_in = self.records_kept = 0
        self.dropped: dict[str, int] = {}
        self.changed: dict[str, int] = {}
        self.layouts: dict[str, int] = {}
        self.examples: dict[str, list[dict[str, str]]] = {}

    def drop(self, reason: str, **example: Any) -> None:
        """Count a record that is not kept; `example` says which one (file, place, id, detail)."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < 3:
            shown.append({k: printable(v)[:400] for k, v in example.items() if v})

    def report(self) -> dict[str, Any]:
        return vars(self)


def new_tallies(sources: list[Source]) -> dict[str, Tally]:
    """A tally for each source by its name."""
    names = source_names(sources)
    return {n: Tally(printable(s.path)) for n, s in zip(names, sources, strict=True)}


def printable(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


class Conversation(NamedTuple):
    """`record` is what comes out, `line` the same as JSON in UTF-8; where it stood."""

    record: dict[str, Any]
    line: bytes
    file: str
    place: str


def conversations(
    source: Source,
    name: str,
    corpus: Corpus,
    mode: str,
    tally: Tally,
    meter: Meter | None = None,
) -> Iterator[Conversation]:
    """Usable records of a source.

    Everything that is not usable is counted in `tally`, or stops the run with `InputError`
    where the configuration says so.
    """
    for file, (place, value, fault) in source_records(source, meter):
        tally.records_in += 1
        try:
            if fault:
                raise Unusable("unreadable", fault, "on_bad_record")
            layout, messages, tools, notes = to_conversation(value, corpus.roles, source.column)
            messages, more = settle(messages, mode)
            record = {
                "id": digest(messages, tools),
                "source": name,
                "messages": messages,
            }
            if tools:
                record["tools"] = tools
            line = json.dumps(record, ensure_ascii=False).encode()
        except Unusable as error:
            refuse(error, corpus, tally, file, place, value)
        except UnicodeEncodeError:
            what = "text with a byte that is not UTF-8, or with half a surrogate pair"
            error = Unusable("broken Unicode", what, "on_bad_record")
            refuse(error, corpus, tally, file, place, value)
        except RecursionError:
            error = Unusable("unreadable", "nested too deeply", "on_bad_record")
            refuse(error, corpus, tally, file, place, value)
        except Exception as fault:  # a fault of the program still names the record
            refuse(not_foreseen(fault), corpus, tally, file, place, value)
        else:
            tally.layouts[layout] = tally.layouts.get(layout, 0) + 1
            for note in notes + more:
                tally.changed[note] = tally.changed.get(note, 0) + 1
            yield Conversation(record, line, file, place)


def not_foreseen(fault: Exception) -> Unusable:
    """A record that the program fails on; the message also says where in the program."""
    at = traceback.extract_tb(fault.__traceback__)[-1]
    where = f"{Path(at.filename).name}, line {at.lineno}"
    detail = f"{type(fault).__name__}: {fault} ({where}); please report it"
    return Unusable("not foreseen", detail, "on_bad_record")


def refuse(
    fault: Unusable, corpus: Corpus, tally: Tally, file: str, place: str, value: Any
) -> None:
    """Count the record, or raise `InputError` where the configuration stops at such records."""
    if fault.policy and getattr(corpus, fault.policy) == "stop":
        option = "--" + fault.policy.replace("_", "-")
        raise InputError(
            f"{file}: {place}: {fault}. {fault.hint}Repair the record, or drop and count such "
            f"records: {option} drop (corpus.{fault.policy})"
        )
    given = value.get("id") if isinstance(value, dict) else None
    given = given if isinstance(given, str | int) else None
    tally.drop(fault.reason, file=file, place=place, record=given, detail=fault.detail)


def dataset_place(path: str) -> str | None:
    """Id or folder of a Hugging Face dataset; None for other paths."""
    if path.startswith("hf:"):
        return path[3:]
    return path if is_saved_dataset(path) else None


def source_records(source: Source, meter: Meter | None = None) -> Iterator[tuple[str, Record]]:
    """Every record of a source with the name of its file."""
    place = dataset_place(source.path)
    if place is not None:
        for record in read_dataset(place, source.split, source.subset):
            yield source.path, record
        return
    for file in expand(source.path)[0]:
        for record in read_records(file, source.column, meter):
            yield str(file), record


def check_files(sources: list[Source], output: Path) -> int:
    """All bytes of all sources; `InputError` when one is missing or a file that a run makes in its
    folder of prompts, `output`."""
    own = {(output / name).resolve() for name in PROMPT_FILES}
    total = 0
    for source in sources:
        if dataset_place(source.path) is not None:
            continue
        files, passed_over = expand(source.path)
        for file in files:
            if file.resolve() in own:
                raise InputError(f"{file}: a source of this run and its output; change one of them")
            total += file.stat().st_size
        if passed_over:
            some = ", ".join(p.name for p in passed_over[:5])
            print(f"{source.path}: not data files, passed over: {some}", file=sys.stderr)
    return total


def check_source(source: Source, corpus: Corpus) -> None:
    """Look at a source's first record: is there one, and does a layout fit?

    Raises `InputError` when not, before the other sources are read.
    """
    for file, (place, value, fault) in source_records(source):
        try:
            if not fault:
                to_conversation(value, corpus.roles, source.column)
        except Unusable as error:
            if error.policy:
                refuse(error, corpus, Tally(source.path), file, place, value)
        except Exception:
            pass  # told when it is read
        return
    raise InputError(
        f"{source.path}: no records: the source is empty (or white space, or an empty list); "
        "check the path, or take the source out"
    )
