"""Conversations rendered by a tokenizer's chat template, with the source of every character."""

from typing import Any, NamedTuple

import jinja2

from aerie.chat.controls import Controls
from aerie.chat.messages import Message, plain_messages, trace_message, with_text_arguments
from aerie.chat.tracing import (
    RESERVED,
    Mark,
    Origin,
    Traced,
    compile_template,
    fixed_strftime,
    plain_text,
    trace,
)
from aerie.chat.unverified import Unverified


class RenderedTurn(NamedTuple):
    """Neighbouring marks of one message in a rendering."""

    source: Origin
    marks: list[Mark]

    @property
    def start(self) -> int:
        return self.marks[0].start

    @property
    def end(self) -> int:
        return self.marks[-1].end


def rendered_turns(text: Traced) -> list[RenderedTurn]:
    """The turns of a rendering in its order."""
    turns: list[RenderedTurn] = []
    for mark in text.marks:
        if turns and turns[-1].source.message == mark.source.message:
            turns[-1].marks.append(mark)
        else:
            turns.append(RenderedTurn(mark.source, [mark]))
    return turns


class Renderer:
    """Renders conversations; every result equals that of transformers, or is refused."""

    def __init__(self, tokenizer: Any, template: str, controls: Controls):
        """`template`: the text of the tokenizer's chat template (of several: all of them)."""
        self.tokenizer, self.controls = tokenizer, controls
        self._compiled: dict[str, Any] = {}
        self._variables: dict[str, Any] = {}
        if "date_string" in template:
            self._variables["date_string"] = fixed_strftime("%d %b %Y")

    def render(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> Traced:
        """The conversation as text with marks; `generation` adds the generation prompt.

        Raises `Unverified` when the template refuses the conversation or fails on it, or when
        the source of a character is not certain.
        """
        given = plain_messages(messages)
        try:
            return self._render(given, tools, generation)
        except TypeError:
            # Some templates paste a call's arguments as text and fail on an object.
            if not any(message.get("tool_calls") for message in given):
                raise Unverified("the chat template fails on this conversation") from None
        try:
            return self._render(with_text_arguments(given), tools, generation)
        except TypeError:
            raise Unverified("the chat template fails on this conversation") from None

    def _render(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> Traced:
        tools = tools or None
        try:
            expected = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation,
                strftime_now=fixed_strftime,
                **self._variables,
            )
            template = self.tokenizer.get_chat_template(None, tools)
            if template not in self._compiled:
                self._compiled[template] = compile_template(template)
            rendered = self._compiled[template](
                **self.tokenizer.special_tokens_map,
                **self._variables,
                messages=[trace_message(i, message) for i, message in enumerate(messages)],
                tools=trace(tools, -1, "tools", "tools"),
                documents=None,
                add_generation_prompt=generation,
            )
        except jinja2.TemplateError as error:
            raise Unverified(f"the chat template refuses: {str(error)[:80]}") from error
        except TypeError:
            raise  # perhaps because of the form of a call's arguments, see `render`
        except Exception as error:  # a template is a program; it can fail in any way
            raise Unverified("the chat template fails on this conversation") from error
        if plain_text(rendered) != expected:
            raise Unverified("the rendering cannot be traced")
        if RESERVED[0] in expected:
            raise Unverified("reserved characters (U+10FDD0) in the text")
        try:
            expected.encode()
        except UnicodeEncodeError:
            raise Unverified("text that is not valid Unicode (lone surrogates)") from None
        self._refuse_unmarked(rendered, messages)
        return rendered

    def _refuse_unmarked(self, rendered: Traced, messages: list[Message]) -> None:
        """Refuse a message's text that was rendered without marks: it would count as the
        template's."""
        marked = {(m.source.message, m.source.field) for m in rendered.marks}
        template_text = None
        for i, message in enumerate(messages):
            content = message["content"].strip()
            if not content or {(i, "content"), (i, "reasoning_content")} & marked:
                continue
            if template_text is None:
                template_text = _unmarked(rendered)
            matters = self.controls.pattern.search(content) or message["role"] == "assistant"
            if matters and len(content) > 1 and content in template_text:
                raise Unverified("the rendering cannot be traced")


def _unmarked(text: Traced) -> str:
    """The characters of a rendering that no message claims; NUL separates the runs."""
    plain, position, parts = plain_text(text), 0, []
    for mark in text.marks:
        parts.append(plain[position : mark.start])
        position = mark.end
    return "\0".join([*parts, plain[position:]])
