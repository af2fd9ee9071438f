"""Prompts, their continuation, fingerprints and loading."""

import json
from datetime import datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from aerie.chat.template import ChatTemplate
from aerie.chat.unverified import Unverified
from aerie.common.errors import InputError
from support.chat import (
    CASES,
    TALK,
    answer,
    chat_of,
    count_controls,
    make_tokenizer,
    talks,
    texts,
    user,
)
from support.templates import CHATML, STRIPPING


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_prefixes_of_conversations(name):
    chat = chat_of(name)
    masked = chat.mask(TALK)
    first = chat.prompt_ids(TALK[:1])
    assert masked.input_ids[: len(first)] == first
    assert masked.loss_mask.index(True) == len(first)
    second = chat.prompt_ids(TALK[:3])
    assert masked.input_ids[: len(second)] == second
    assert masked.last_turn == len(second)
    # The engine's answer, complete and cut before its last token.
    end = next(i for i in range(len(first), len(masked.loss_mask)) if not masked.loss_mask[i])
    ids = masked.input_ids[:end]
    assert chat.next_prompt_ids(TALK[:3], ids) == second
    assert chat.next_prompt_ids(TALK[:3], ids[:-1]) == second
    assert chat.decode(ids[len(first) :]).strip() == "It is 42."


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_next_prompt_continues_the_ids_of_the_answer(name, data):
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
    # The answer differs from the conversation's.
    assert chat.next_prompt_ids(more, [*prompt, *generated, *generated]) is None


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
def test_failing_template_gives_a_reason(fault):
    template = CHATML.replace(
        "{% endfor %}", f"{{% if 'odd' in m.content %}}{fault}{{% endif %}}{{% endfor %}}"
    )
    chat = ChatTemplate(make_tokenizer("bytes", "chatml", template))
    assert chat.mask(TALK).input_ids == chat_of("chatml").mask(TALK).input_ids
    odd = [user("odd"), answer("A")]
    for ask in (chat.mask, chat.dropped_fields, chat.prompt_ids):
        with pytest.raises(Unverified, match=r"the chat template (refuses|fails)"):
            ask(odd)


def test_exactly_one_bos():
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


def test_today_is_the_fixed_date(monkeypatch):
    today = datetime.now().strftime("%d %b %Y")
    chat = chat_of("llama3")
    text = chat.tokenizer.decode(chat.prompt_ids([user("a")]))
    assert "Today Date: 26 Jul 2024" in text and today not in text
    asking = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    chat = ChatTemplate(make_tokenizer("bytes", "chatml", asking))
    assert chat.tokenizer.decode(chat.prompt_ids([user("a")])).startswith("2024-07-26")
    before = chat.fingerprint
    monkeypatch.setattr("aerie.chat.probing.FIXED_DATE", datetime(2025, 1, 1))
    assert ChatTemplate(chat.tokenizer).fingerprint != before


def test_fingerprint_depends_on_behaviour():
    def fingerprint(kind="bytes", template=CHATML, eos=()):
        return ChatTemplate(make_tokenizer(kind, "chatml", template), eos).fingerprint

    assert fingerprint() == fingerprint()
    different = [fingerprint("llama3-bytes"), fingerprint(template=STRIPPING), fingerprint(eos=[7])]
    assert len({fingerprint(), *different}) == 4


def test_load_reads_a_checkpoint_folder(tmp_path):
    make_tokenizer("bytes", "chatml", CHATML).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [393, 391]}')
    chat = ChatTemplate.load(tmp_path)
    assert {393, 391} <= chat.eos_ids
    assert chat.mask(TALK) == chat_of("chatml").mask(TALK)
    assert chat.decode([*chat.tokenizer("Hi 🙂")["input_ids"], 391]) == "Hi 🙂"


def test_load_refuses_unusable_folders(tmp_path):
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
