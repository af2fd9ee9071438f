"""Text from elsewhere, made fit to show."""

import time
from typing import Any


def printable(text: str) -> str:
    """Text without characters that would control the terminal."""
    return "".join(c if c.isprintable() else "↵" if c == "\n" else " " for c in text)


def printable_lines(text: str) -> str:
    """The same with its line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def shorten(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def beginning(record: dict[str, Any]) -> str:
    """The start of a record's first user turn, in quotation marks."""
    asked = next(m["content"] for m in record["messages"] if m["role"] == "user")
    return f"“{shorten(' '.join(asked.split()), 80)}”"


def clock(moment: float | None) -> str:
    """A time (Unix seconds) of today as 12:34:56, another with its date."""
    unknown = "an unknown time"
    if not moment:
        return unknown
    try:
        then = time.localtime(moment)
    except (OverflowError, ValueError, OSError):
        return unknown
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)
