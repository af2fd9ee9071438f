"""The reference of all keys in config/README.md, generated from the sections."""

from typing import Any

from aerie.common.describe import leaves, limits, type_name
from aerie.config.root import Config
from aerie.config.section import Section


def describe_config() -> str:
    """The reference of every key as Markdown tables."""
    parts: list[str] = []

    def table(title: str, model: type[Section]) -> None:
        parts.append(f"\n## {title}\n\n{(model.__doc__ or '').strip()}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        inner = []
        for name, field in model.model_fields.items():
            sections = [
                a
                for a in leaves(field.annotation)
                if isinstance(a, type) and issubclass(a, Section)
            ]
            if sections and field.annotation is sections[0]:
                inner.append((name, sections[0]))
                continue
            if sections:
                inner.append(
                    (f"{title}.{name}" if model is not Config else f"{name}.<name>", sections[0])
                )
            default = "required" if field.is_required() else _plain(field.default)
            bounds = limits(field.metadata)
            kind = type_name(field.annotation) + (f", {bounds}" if bounds else "")
            text = " ".join((field.description or "").split()).replace("|", "\\|")
            parts.append(f"| `{name}` | {kind} | {default} | {text} |")
        for name, section in inner:
            table(name, section)

    def _plain(value: Any) -> str:
        if isinstance(value, dict | list):
            return "see `config.yaml`" if value else "none"
        if value is None:
            return "null"
        return f"`{str(value).lower() if isinstance(value, bool) else value}`"

    table("top level", Config)
    return "\n".join(parts).lstrip("\n") + "\n"
