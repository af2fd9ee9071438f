"""Odd turns in both modes."""

import pytest

from aerie.corpus.odd_turns import settle
from aerie.corpus.unusable import Unusable
from support.corpus import short


def m(text):
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    message = {"role": roles[text[0]], "content": text[2:].partition("!")[0]}
    if "!" in text:
        name = text.partition("!")[2]
        function = {"name": name, "arguments": {}}
        message["tool_calls"] = [{"type": "function", "function": function}]
    return message


# (turns given, what `generate` makes of them, what `keep` makes of them); a text stands for the
# reason for which the record is dropped.
ODD = {
    "plain": ("u:1 a:2 u:3 a:4", "u:1 u:3", "u:1 a:2 u:3 a:4"),
    "system": ("s:S u:1 a:2", "s:S u:1", "s:S u:1 a:2"),
    "first turn by the assistant": ("a:hi u:1 a:2", "u:1", "u:1 a:2"),
    "two user turns": ("u:1 u:2 a:3", "u:1\n\n2", "u:1\n\n2 a:3"),
    "two answers": ("u:1 a:2 a:3", "u:1", "u:1 a:2\n\n3"),
    "last turn by the user": ("u:1 a:2 u:3", "u:1 u:3", "u:1 a:2"),
    "no answer": ("u:1", "u:1", "no assistant turn"),
    "only an answer": ("a:1", "no user turn", "no user turn"),
    "empty question": ("u: a:1", "empty user turn", "empty user turn"),
    "empty question later": ("u:1 a:2 u: a:3", "u:1", "u:1 a:2"),
    "empty answer": ("u:1 a:", "u:1", "empty answer"),
    "blank answer": ("u:1 a:\n\t", "u:1", "empty answer"),
    "empty answer later": ("u:1 a:2 u:3 a: u:5 a:6", "u:1 u:3 u:5", "u:1 a:2"),
    "tool call": ("u:1 a:!f t:2 a:3 u:4 a:5", "u:1", "u:1 a:!f t:2 a:3 u:4 a:5"),
    "tool call later": ("u:1 a:2 u:3 a:!f t:4", "u:1 u:3", "u:1 a:2 u:3 a:!f"),
    "tool result without a call": ("u:1 t:2 a:3", "u:1", "u:1 t:2 a:3"),
    "two calls": ("u:1 a:!f a:!g t:2", "u:1", "u:1 a:!f!g"),
    "text after a call": ("u:1 a:!f a:2", "u:1", "u:1 a:!f a:2"),
    "text before a call": ("u:1 a:2 a:!f", "u:1", "u:1 a:2!f"),
    "late system turn": ("u:1 s:S a:2", "system turn in the middle", "u:1 s:S a:2"),
    "system turn later": ("u:1 a:2 s:S u:3 a:4", "u:1", "u:1 a:2 s:S u:3 a:4"),
    "nothing": ("", "no messages", "no messages"),
}


@pytest.mark.parametrize("mode", ["generate", "keep"])
@pytest.mark.parametrize("name", ODD)
def test_settle_handles_odd_turns(name, mode):
    text, *expected = ODD[name]
    right = expected[mode == "keep"]
    messages = [m(part) for part in text.split(" ") if part]
    if right[1:2] != ":":
        with pytest.raises(Unusable) as error:
            settle(messages, mode)
        assert error.value.reason == right
    else:
        used = settle(messages, mode)[0]
        assert short(used) == right.split(" ")


def test_turns_are_joined_directly_at_white_space():
    messages = [m("u:1"), m("a:First half"), {"role": "assistant", "content": " and second."}]
    assert short(settle(messages, "keep")[0]) == ["u:1", "a:First half and second."]
