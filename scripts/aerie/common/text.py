"""Texts of others, made fit to be shown in a line."""

from typing import Any


def printable(text: str) -> str:
    """Text without characters that would steer the terminal."""
    return "".join(c if c.isprintable() else "↵" if c == "\n" else " " for c in text)


def shorten(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def beginning(record: dict[str, Any]) -> str:
    """How a record's first user turn begins, in quotation marks."""
    asked = next(m["content"] for m in record["messages"] if m["role"] == "user")
    return f"“{shorten(' '.join(asked.split()), 80)}”"
