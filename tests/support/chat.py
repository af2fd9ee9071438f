"""Small tokenizers with chat templates, and conversations for them."""

import functools
import json
import re

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from aerie.chat.template import ChatTemplate
from aerie.chat.tracing import RESERVED
from support.templates import (
    CHATML,
    DEEPSEEK,
    DEFAULT_SYSTEM,
    GEMMA,
    LLAMA2,
    LLAMA3,
    MISTRAL,
    PHI3,
    QWEN3,
    STRIPPING,
    TAGGED,
)

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
    if kind == "prefix":  # as Llama 2: a blank before every text
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


TALK = [
    user("What is 12 + 30?"),
    answer("It is 42."),
    user("And the quick fox?"),
    answer("Jumps\nover  the dog, naïve 🙂"),
]


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
        # Decoded alone, a run may lose its first blank, so the token before it is decoded too.
        before = chat.tokenizer.decode(ids[i - 1 : i])
        runs.append(chat.tokenizer.decode(ids[i - 1 : j])[len(before) :])
        i = j
    return runs


def plain_ids(chat, messages, **options):
    text = chat.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def as_read(text: str, name: str) -> str:
    """A supervised text, without the blanks that these tokenizers and templates change."""
    if CASES[name][0] in ("prefix", "unigram"):
        text = text.replace("▁", " ")  # SentencePiece's blank
    if name in ("mistral", "llama2", "mistral-bytes"):
        # One blank from the template, which the assistant writes, and one from the tokenizer.
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
    special = chat.controls.special.values()
    return [i for i in ids if i in special]
