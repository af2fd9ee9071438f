"""Pydantic classes described as Markdown tables, for config/README.md and docs/formats.md."""

import importlib
import re
import types
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from aerie.common.records import Record


def leaves(annotation: Any) -> list[Any]:
    arguments = typing.get_args(annotation)
    return [leaf for a in arguments for leaf in leaves(a)] if arguments else [annotation]


def type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return type_name(typing.get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f"`{v}`" for v in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in typing.get_args(annotation))
    if origin is list:
        return f"list of {type_name(typing.get_args(annotation)[0])}"
    if origin is dict:
        return f"table of {type_name(typing.get_args(annotation)[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return "object"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    if annotation is type(None):
        return "null"
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def limits(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(limit, name)}"
        for limit in metadata
        for name, sign in signs.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join(found)


def describe_record(model: type[BaseModel]) -> str:
    """The fields of a record as a Markdown table: key, type and meaning."""
    rows = ["| key | type | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(
            f"| `{field.serialization_alias or name}` | {type_name(field.annotation)} | {text} |"
        )
    return "\n".join(rows) + "\n"


MARK = re.compile(r"(<!-- record ([\w.]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
"""Where a page has the table of a record: the class's full name, the table, the end."""


def fill_records(page: str) -> str:
    """The page with the table of each record that it marks."""

    def table(found: re.Match[str]) -> str:
        module, _, name = found[2].rpartition(".")
        model = getattr(importlib.import_module(module), name)
        return found[1] + describe_record(model) + found[3]

    return MARK.sub(table, page)
