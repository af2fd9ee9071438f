"""Chat templates rendered so that the source of every character is known.

A template is an ordinary program that can strip, split, drop or reorder what it is given, so the
result alone does not show where a message's text is. Here the texts of a conversation are `Traced`
strings: they behave as `str` and carry marks through the operations that templates use. An
operation that is not covered gives a plain string. Its text then counts as the template's, which
`rendering.py` notices, and never as another message's.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A template that asks for today's date gets this one; otherwise the same corpus would give other
# tokens tomorrow. Llama 3's own template falls back to this date, too.
FIXED_DATE = datetime(2024, 7, 26)

# Marks the placeholders of texts inside JSON; text with these characters is refused.
RESERVED = "\U0010fdd0\U0010fdd1\U0010fdd2"


class Origin(NamedTuple):
    """Where text came from: index of the message (-1: the tools), its role and the field."""

    message: int
    role: str
    field: str  # content, reasoning_content, tool_calls, tools or another key


class Mark(NamedTuple):
    """Characters [start, end) came from `source`; start = end where an empty text is."""

    start: int
    end: int
    source: Origin


class Traced(str):
    """A `str` whose marks, in order and without overlap, survive a template's operations."""

    marks: tuple[Mark, ...]

    def __new__(cls, text: str, marks: Iterable[Mark] = ()) -> "Traced":
        self = super().__new__(cls, text)
        self.marks = tuple(marks)
        return self

    def __str__(self) -> "Traced":
        return self

    def cut(self, start: int, end: int) -> "Traced":
        """The characters [start, end)."""
        end = max(start, end)
        kept = []
        for mark in self.marks:
            low, high = max(mark.start, start), min(mark.end, end)
            # A text stripped to nothing keeps its place; one cut away beside others does not.
            if low < high or (low == high and (mark.start == mark.end or start == end)):
                kept.append(Mark(low - start, high - start, mark.source))
        return Traced(str.__getitem__(self, slice(start, end)), kept)

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            if step != 1:
                return str.__getitem__(self, key)
            return self.cut(start, end)
        position = range(len(self))[key]
        return self.cut(position, position + 1)

    def __iter__(self):
        return (self.cut(i, i + 1) for i in range(len(self)))

    def __add__(self, other: Any) -> "Traced":
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> "Traced":
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: Any) -> "Traced":
        return concat([self] * times)

    __rmul__ = __mul__

    def lstrip(self, chars: str | None = None) -> "Traced":
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> "Traced":
        return self.cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None) -> "Traced":
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> "Traced":
        return self.cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str) -> "Traced":
        return self.cut(0, len(self) - (len(suffix) if self.endswith(suffix) else 0))

    def _pieces(self, parts: list[str]) -> list["Traced"]:
        """The substrings `parts`, which follow one another in this text, with their marks."""
        found, position = [], 0
        for part in parts:
            position = str.index(self, str(part), position)
            found.append(self.cut(position, position + len(part)))
            position += len(part)
        return found

    def split(  # type: ignore[override]
        self, sep: str | None = None, maxsplit: int = -1
    ) -> list["Traced"]:
        if sep is None:
            return self._pieces(str.split(self, None, maxsplit))
        found, position = [], 0
        for part in str.split(self, sep, maxsplit):
            found.append(self.cut(position, position + len(part)))
            position += len(part) + len(sep)
        return found

    def rsplit(  # type: ignore[override]
        self, sep: str | None = None, maxsplit: int = -1
    ) -> list["Traced"]:
        if sep is None:
            return self._pieces(str.rsplit(self, None, maxsplit))
        found, position = [], 0
        for part in str.rsplit(self, sep, maxsplit):
            found.append(self.cut(position, position + len(part)))
            position += len(part) + len(sep)
        return found

    def splitlines(self, keepends: bool = False) -> list["Traced"]:  # type: ignore[override]
        found, position = [], 0
        lines = zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True)
        for whole, line in lines:
            found.append(self.cut(position, position + len(line)))
            position += len(whole)
        return found

    def partition(self, sep: str) -> tuple["Traced", "Traced", "Traced"]:
        before, middle, _ = str.partition(self, sep)
        first, second = len(before), len(before) + len(middle)
        return self.cut(0, first), self.cut(first, second), self.cut(second, len(self))

    def rpartition(self, sep: str) -> tuple["Traced", "Traced", "Traced"]:
        before, middle, _ = str.rpartition(self, sep)
        first, second = len(before), len(before) + len(middle)
        return self.cut(0, first), self.cut(first, second), self.cut(second, len(self))

    def replace(  # type: ignore[override]
        self, old: str, new: str, count: int = -1
    ) -> "Traced":
        if not old or old not in self:
            return self if old else Traced(str.replace(self, old, new, count))
        parts = self.split(old, count)
        place = {m.source for m in self.marks}
        if len(place) == 1 and isinstance(new, str) and not isinstance(new, Traced):
            # The replacement takes the place of this text's characters, so it belongs to it.
            new = Traced(new, [Mark(0, len(new), next(iter(place)))] if new else [])
        return _join(new, parts)

    def join(self, parts: Iterable[str]) -> "Traced":
        return _join(self, list(parts))

    def _same_length(self, text: str) -> "Traced":
        return Traced(text, self.marks if len(text) == len(self) else ())

    def lower(self) -> "Traced":
        return self._same_length(str.lower(self))

    def upper(self) -> "Traced":
        return self._same_length(str.upper(self))

    def title(self) -> "Traced":
        return self._same_length(str.title(self))

    def capitalize(self) -> "Traced":
        return self._same_length(str.capitalize(self))


def plain_text(text: str) -> str:
    """The text without its marks."""
    return str.__str__(text)


def concat(parts: Iterable[str]) -> Traced:
    """`''.join(parts)`; neighbouring marks of one source become one."""
    texts: list[str] = []
    marks: list[Mark] = []
    length = 0
    for part in parts:
        for mark in getattr(part, "marks", ()):
            moved = Mark(mark.start + length, mark.end + length, mark.source)
            if marks and marks[-1].end == moved.start and marks[-1].source == moved.source:
                moved = Mark(marks.pop().start, moved.end, moved.source)
            marks.append(moved)
        texts.append(plain_text(part) if isinstance(part, Traced) else part)
        length += len(part)
    return Traced("".join(texts), marks)


def _join(separator: str, parts: Iterable[str]) -> Traced:
    joined: list[str] = []
    for i, part in enumerate(parts):
        joined += [separator, part] if i else [part]
    return concat(joined)


def trace(value: Any, message: int, role: str, field: str) -> Any:
    """`value` with every string in it, keys included, traced to the given source."""
    if isinstance(value, str):
        return Traced(value, [Mark(0, len(value), Origin(message, role, field))])
    if isinstance(value, dict):
        return {
            trace(k, message, role, field): trace(v, message, role, field) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [trace(v, message, role, field) for v in value]
    return value


_PLACEHOLDER = re.compile(f'"{RESERVED[0]}(\\d+){RESERVED[1]}"')


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` of transformers' templates, with marks."""
    texts: list[Traced] = []

    def placeholder(text: Traced) -> str:
        texts.append(text)
        return f"{RESERVED[0]}{len(texts) - 1}{RESERVED[1]}"

    def replaced(item: Any) -> Any:
        if isinstance(item, Traced):
            return placeholder(item)
        if isinstance(item, dict):
            pairs = sorted(item.items()) if sort_keys else item.items()
            return {replaced(k): replaced(v) for k, v in pairs}
        if isinstance(item, list | tuple):
            return [replaced(v) for v in item]
        return item

    plain = json.dumps(
        replaced(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators
    )
    parts: list[str] = []
    for i, part in enumerate(_PLACEHOLDER.split(plain)):
        if i % 2 == 0:
            parts.append(part)
            continue
        text = texts[int(part)]
        inner: list[str] = []
        position = 0
        for mark in text.marks:
            inner.append(json.dumps(text[position : mark.start], ensure_ascii=ensure_ascii)[1:-1])
            escaped = json.dumps(
                str.__getitem__(text, slice(mark.start, mark.end)), ensure_ascii=ensure_ascii
            )[1:-1]
            inner.append(Traced(escaped, [Mark(0, len(escaped), mark.source)]))
            position = mark.end
        inner.append(json.dumps(text[position:], ensure_ascii=ensure_ascii)[1:-1])
        parts += ['"', *inner, '"']
    return concat(parts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks print their body; the marks are more precise than the tags."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _TracedCode(CodeGenerator):
    def visit_Concat(self, node: Any, frame: Any) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _TracedEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _TracedCode
    concat = staticmethod(concat)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # ', '.join(texts): the method of a plain string would lose the marks.
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if type(owner) is str and name in ("join", "replace"):
            function = getattr(Traced(owner), name)
        return super().call(context, function, *args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@jinja2.pass_environment
def _join_filter(environment: Any, value: Any, d: str = "", attribute: Any = None) -> Traced:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return _join(str(d), [str(part) for part in value])


def fixed_strftime(form: str) -> str:
    """The fixed date in the format that a template asks for."""
    return FIXED_DATE.strftime(form)


def compile_template(text: str) -> Callable[..., Traced]:
    """A function that renders the template `text` as transformers does, with marks.

    Raises `jinja2.TemplateError` when the text is not a template; the function raises it when the
    template refuses what it is given.
    """
    environment = _TracedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,
    )
    environment.filters["tojson"] = tojson
    environment.filters["join"] = _join_filter
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = fixed_strftime
    template = environment.from_string(text)

    def render(**variables: Any) -> Traced:
        return concat(template.root_render_func(template.new_context(variables)))

    return render
