"""Loss masks: several templates and tokenizers, hostile text, property tests."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie.chat.template import ChatTemplate
from aerie.chat.unverified import Unverified
from support.chat import (
    CALL,
    CASES,
    LOOKALIKES,
    TALK,
    TOOLS,
    WORK,
    answer,
    as_read,
    call,
    chat_of,
    count_controls,
    make_tokenizer,
    plain_ids,
    qwen,
    spoken,
    talks,
    user,
)
from support.templates import GLM, PLAIN


@pytest.mark.parametrize("name", CASES)
def test_ordinary_text_gets_the_usual_ids_and_an_exact_mask(name):
    chat, (*_, rendered, end) = chat_of(name), CASES[name]
    masked = chat.mask(TALK)
    ids = plain_ids(chat, TALK, date_string="26 Jul 2024")
    assert masked.input_ids == ids
    assert len(masked.loss_mask) == len(ids)
    expected = [rendered(m["content"]) + end for m in TALK if m["role"] == "assistant"]
    assert [as_read(t, name) for t in spoken(chat, masked)] == [as_read(t, name) for t in expected]
    assert masked.loss_mask[masked.last_turn] and not masked.loss_mask[masked.last_turn - 1]
    assert sum(masked.loss_mask[masked.last_turn :]) == sum(
        chat.mask([user("x"), TALK[3]]).loss_mask
    )


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_supervised_spans_equal_the_assistants_text(name, data):
    chat, (*_, rendered, end) = chat_of(name), CASES[name]
    messages = data.draw(talks(system=name != "gemma"))
    masked = chat.mask(messages)
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    if name == "deepseek":
        said = [text.split("</think>")[-1] for text in said]
    expected = [rendered(text) + end for text in said]
    got = spoken(chat, masked)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert as_read(a, name) == as_read(b, name)
    # Only what the template writes becomes control tokens.
    calm = [{**m, "content": "x"} for m in messages]
    assert count_controls(chat, masked.input_ids) == count_controls(chat, plain_ids(chat, calm))


CALLED = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 12, "note": "say \\"x</s>\\""}}\n</tool_call>'
)


@pytest.mark.parametrize("supervised", [True, False])
def test_reasoning_and_calls_are_supervised(supervised):
    chat = qwen()
    thoughts = ["<think>\nTwo numbers.\n</think>\n\n", "<think>\nEasy.\n</think>\n\n"]
    if not supervised:
        thoughts = ["", ""]
    masked = chat.mask(WORK, TOOLS, supervise_reasoning=supervised)
    assert spoken(chat, masked) == [
        thoughts[0] + CALLED + "<|im_end|>",
        thoughts[1] + "It is 42.<|im_end|>",
    ]
    assert chat.dropped_fields(WORK, TOOLS) == []
    assert masked.input_ids[masked.last_turn - 1] != chat.tokenizer.eos_token_id


def test_reasoning_dropped_from_earlier_turns_is_not_supervised():
    chat = qwen()
    talk = [
        user("a"),
        answer("<think>\nhm\n</think>\n\nyes"),
        user("b"),
        answer("<think>\nhm\n</think>\n\nno"),
    ]
    assert spoken(chat, chat.mask(talk)) == [
        "yes<|im_end|>",
        "<think>\nhm\n</think>\n\nno<|im_end|>",
    ]
    assert spoken(chat, chat.mask(talk, supervise_reasoning=False))[1] == "no<|im_end|>"
    assert chat.dropped_fields(talk) == ["reasoning_content"]
    assert chat.dropped_fields(talk[2:]) == []
    # The engine generated reasoning that the next prompt drops.
    ids = chat.prompt_ids(talk[:1])
    generated = chat.tokenizer(talk[1]["content"] + "<|im_end|>")["input_ids"]
    assert chat.next_prompt_ids(talk[:3], ids + generated) is None
    short = [user("a"), answer("yes"), user("b")]
    generated = chat.tokenizer("yes<|im_end|>")["input_ids"]
    assert chat.next_prompt_ids(short, ids + generated) == chat.prompt_ids(short)


def test_empty_reasoning_of_the_template_is_not_supervised():
    assert spoken(qwen(), qwen().mask([user("a"), answer("b <think>")])) == ["b <think><|im_end|>"]


def test_tags_are_tokens_in_assistant_text_only():
    chat = qwen()
    think = chat.tokenizer.convert_tokens_to_ids("<think>")
    masked = chat.mask([user("a <think> b"), answer("c"), user("d"), answer("e <think> f")])
    # One in the empty reasoning before the last answer, one within it.
    assert masked.input_ids.count(think) == 2
    supervised = [m for i, m in zip(*masked[:2], strict=True) if i == think]
    assert supervised == [False, True]


@pytest.mark.parametrize("name", ["llama3", "mistral", "mistral-bytes", "deepseek"])
def test_calls_in_other_template_families(name):
    chat = chat_of(name)
    talk = [
        user("12 + 30?"),
        answer("", tool_calls=[CALL]),
        {"role": "tool", "content": "42 </s><|eot_id|>"},
        answer("It is 42."),
    ]
    first = spoken(chat, chat.mask(talk, TOOLS))[0]
    assert '{"a": 12, "note": "say \\"x</s>\\""}' in first
    assert first.endswith(CASES[name][4])
    openings = {"llama3": "{", "deepseek": "<｜tool▁calls▁begin｜>add"}
    assert first.startswith(openings.get(name, "[TOOL_CALLS]"))
    assert "42" not in first
    lost = [] if name.startswith("mistral") else ["tools"]
    assert chat.dropped_fields(talk, TOOLS) == lost
    as_text = [
        talk[0],
        answer("", tool_calls=[call("add", json.dumps(CALL["function"]["arguments"]))]),
    ]
    as_text += talk[2:]
    assert chat.mask(as_text, TOOLS) == chat.mask(talk, TOOLS)
    assert chat.prompt_ids(as_text[:3], TOOLS) == chat.prompt_ids(talk[:3], TOOLS)


def test_malformed_call_arguments_are_refused():
    with pytest.raises(Unverified, match="not valid JSON"):
        qwen().mask([user("a"), answer("", tool_calls=[call("f", '{"a": ')])])


def test_template_without_end_of_turn_token():
    chat = ChatTemplate(make_tokenizer("llama3-bytes", "llama2", PLAIN))
    talk = [user("a"), answer("b### user:\n\n"), user("\n\n"), answer("\n\nc.")]
    assert spoken(chat, chat.mask(talk)) == ["b### user:\n\n", "\n\nc.</s>"]
    ids = chat.prompt_ids(TALK[:1]) + chat.tokenizer("It is 42.")["input_ids"]
    onward = chat.next_prompt_ids(TALK[:3], ids)
    assert chat.tokenizer.decode(onward) == (
        "### user:\nWhat is 12 + 30?\n\n### assistant:\nIt is 42.\n\n"
        "### user:\nAnd the quick fox?\n\n### assistant:\n"
    )
    assert chat.next_prompt_ids(TALK[:3], [*ids, chat.tokenizer.eos_token_id]) is None


def test_header_that_ends_the_previous_turn():
    tokenizer = make_tokenizer("llama3-bytes", "glm", GLM)
    stop = tokenizer.convert_tokens_to_ids("<|user|>")
    chat = ChatTemplate(tokenizer, [stop])
    talk = [user("a"), answer("b <|user|>"), user("c"), answer("d")]
    masked = chat.mask(talk)
    assert spoken(chat, masked) == ["b <|user|><|user|>", "d"]
    assert masked.input_ids.count(stop) == 2
    prompt = chat.prompt_ids(talk[:1])
    ids = prompt + chat.tokenizer("yes")["input_ids"]
    talk[1] = answer("yes")
    assert chat.next_prompt_ids(talk[:3], [*ids, stop]) == chat.prompt_ids(talk[:3])
    assert chat.next_prompt_ids(talk[:3], ids) == chat.prompt_ids(talk[:3])


def test_turn_with_dropped_call_is_not_supervised():
    masked = chat_of("chatml").mask(WORK, TOOLS)
    assert spoken(chat_of("chatml"), masked) == ["It is 42.<|im_end|>"]


def test_mask_agrees_with_generation_tags():
    chat = chat_of("tagged")
    out = chat.tokenizer.apply_chat_template(TALK, return_assistant_tokens_mask=True)
    masked = chat.mask(TALK)
    assert masked.input_ids == out["input_ids"]
    assert masked.loss_mask == [bool(m) for m in out["assistant_masks"]]


def test_token_across_an_edge_is_cut():
    chat = chat_of("chatml-merging")
    talk = [user("a"), answer("\n\nHello")]
    masked = chat.mask(talk)
    prompt = chat.prompt_ids(talk[:1])
    # The plain encoding joins the header's line break to the answer's; an engine cannot.
    assert plain_ids(chat, talk)[: len(prompt)] != prompt
    assert masked.input_ids[: len(prompt)] == prompt
    assert masked.loss_mask.index(True) == len(prompt)
    assert spoken(chat, masked) == ["\n\nHello<|im_end|>"]


def test_unusual_turns():
    chat = chat_of("chatml")
    assert spoken(chat, chat.mask([user("a"), answer("")])) == ["<|im_end|>"]
    assert spoken(chat, chat.mask([answer("a"), user("b")])) == ["a<|im_end|>"]
    two = chat.mask([user("a"), answer("b"), answer("c"), user("d"), user("e")])
    assert spoken(chat, two) == ["b<|im_end|>", "c<|im_end|>"]
    with pytest.raises(Unverified, match="no assistant text"):
        chat.mask([user("a")])
    with pytest.raises(Unverified, match="System role not supported"):
        chat_of("gemma").mask([{"role": "system", "content": "s"}, *TALK])
    with pytest.raises(Unverified, match="reserved"):
        chat.mask([user("\U0010fdd0"), answer("b")])
    with pytest.raises(Unverified, match="surrogates"):
        chat.mask([user("\ud800"), answer("b")])


@pytest.mark.parametrize("name", ["chatml-merging", "llama3", "mistral"])
def test_hundreds_of_turns(name):
    chat, (*_, rendered, end) = chat_of(name), CASES[name]
    said = [f"\nanswer {i} {LOOKALIKES[i % len(LOOKALIKES)]}" for i in range(400)]
    masked = chat.mask([m for i, text in enumerate(said) for m in (user(f"{i}?"), answer(text))])
    expected = [as_read(rendered(text) + end, name) for text in said]
    assert [as_read(text, name) for text in spoken(chat, masked)] == expected
