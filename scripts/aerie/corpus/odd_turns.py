"""Which messages of a conversation are used: empty, repeated and misplaced turns.

docs/corpus.md has the rules.
"""

from aerie.corpus.messages import Message
from aerie.corpus.unusable import Unusable


def settle(messages: list[Message], mode: str) -> tuple[list[Message], list[str]]:
    """The messages that are used in this mode (`generate` or `keep`), and notes on what changed.

    Raises `Unusable` when nothing is left.
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


def _prompts(messages: list[Message]) -> tuple[list[Message], str | None]:
    """System and user turns up to the first that depends on the record's own answers."""
    used: list[Message] = []
    exchange = 0  # where the current exchange starts in `used`
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
    messages: list[Message],
) -> tuple[list[Message], str | None]:
    """All turns up to the first exchange with an empty turn."""
    used: list[Message] = []
    exchange = 0
    for message in messages:
        if message["role"] == "user":
            exchange = len(used)
        if message["role"] in ("user", "assistant") and is_empty(message):
            what = "empty user turn" if message["role"] == "user" else "empty answer"
            return used[:exchange], what
        used.append(message)
    return used, None


def joined(messages: list[Message]) -> list[Message]:
    """The messages with consecutive turns of one role joined.

    Texts are joined with a blank line, or directly where there is white space at the seam.
    Tool results stay separate, and so do assistant turns whose order a template could not keep
    (text after a tool call, reasoning after text).
    """
    found: list[Message] = []
    for message in messages:
        last: Message = found[-1] if found else {"role": None}
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


def is_blank(message: Message) -> bool:
    return not message["content"] and "reasoning_content" not in message


def seam(first: str, second: str) -> str:
    if not first or not second or first[-1].isspace() or second[0].isspace():
        return first + second
    return f"{first}\n\n{second}"


def is_empty(message: Message) -> bool:
    return not message["content"].strip() and "tool_calls" not in message
