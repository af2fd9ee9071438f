"""Bytes, memory and operations of the stages, by arithmetic on the shapes of the models.

Nothing is run and no model is loaded. Memory is estimated by the sums in the docstrings;
allocators take some more.
"""

from dataclasses import dataclass

from aerie.config.drafter import Drafter
from aerie.planning.shape import Shape, attention_parameters

LOSSLESS_SHARE = 0.664
"""Stored by raw bytes of `lossless` shards: SmolLM2-135M (benchmarks/pack_states.py)."""


def state_bytes(tokens: float, ids: int, hidden: int) -> float:
    """Raw bytes of `ids` bf16 states a token."""
    return tokens * ids * hidden * 2


# The engine


def cache_bytes(s: Shape, captured: int = 0, gpus: int = 1) -> float:
    """Bytes of an engine's cache for one token on one GPU, 2 a value.

    Keys and values of all layers (MLA: the compressed vector, which every GPU holds; else the heads
    are divided among the GPUs), and the `captured` states, which every GPU holds.
    """
    if s.kv_rank:
        keys: float = s.layers * (s.kv_rank + s.rope_dim)
    else:
        keys = s.layers * 2 * s.kv_heads / min(gpus, s.kv_heads) * s.head_dim
    return 2 * (keys + captured * s.hidden)


@dataclass(frozen=True)
class EngineMemory:
    """Memory of the verifier in the engine, bytes on each GPU.

    `activations`: the residual stream, the widest MLP and the logits of a step. `cache_one`: cache
    of the longest sequence; `cache_all`: of all sequences at a time. `least`: what must fit for the
    engine to start, weights, a step and one sequence.
    """

    weights: float
    activations: float
    cache_one: float
    cache_all: float
    least: float


def engine_memory(
    s: Shape, weights: float, gpus: int, captured: int, length: int, seqs: int, batched: int
) -> EngineMemory:
    """Memory with all `weights` (bytes) on `gpus` GPUs, `captured` states a token, `seqs` sequences
    of `length` tokens, and steps of `batched` tokens."""
    token = cache_bytes(s, captured, gpus)
    width = 4 * s.hidden + 3 * max(s.intermediate, s.expert_size * s.active_experts) / gpus
    share = weights / gpus
    activations = batched * width * 2 + seqs * s.vocab * 4 / gpus
    one = token * length
    return EngineMemory(share, activations, one, one * seqs, share + activations + one)


def generation_operations(
    active: int, prompt_tokens: float, new_tokens: float
) -> tuple[float, float]:
    """Floating-point operations of the prompts and of the new tokens: 2 a parameter and token."""
    return 2.0 * active * prompt_tokens, 2.0 * active * new_tokens


# Drafters


@dataclass(frozen=True)
class DrafterParameters:
    """Parameters of a drafter. `trained`: fc and layers. `head`: the draft vocabulary's rows of
    lm_head, `vocabulary` of them; the teacher has them once more."""

    trained: int
    embedding: int
    head: int
    vocabulary: int


def drafter_parameters(s: Shape, drafter: Drafter, aux: int) -> DrafterParameters:
    """Parameters of an EAGLE-3 drafter as speculators builds it from the verifier's shape.

    `aux`: states fed to it. The first layer's q, k, v take twice the width.
    """
    size = s.vocab if drafter.vocabulary == "full" else drafter.vocabulary
    mlp = 3 * s.hidden * s.intermediate
    layers = attention_parameters(s, 2 * s.hidden) + mlp
    layers += (drafter.num_layers - 1) * (attention_parameters(s, s.hidden) + mlp)
    norms = (aux + 4 + 2 * (drafter.num_layers - 1)) * s.hidden
    trained = aux * s.hidden * s.hidden + layers + norms
    return DrafterParameters(trained, s.vocab * s.hidden, size * s.hidden, size)


def drafter_bytes(p: DrafterParameters) -> int:
    """Size of the finished drafter: bf16 weights, embedding and head among them."""
    return 2 * (p.trained + p.embedding + p.head)


def checkpoint_bytes(p: DrafterParameters, optimizer: str) -> int:
    """Size of one checkpoint: float32 weights, and one value of Muon or two of AdamW for each
    trained one."""
    moments = 1 if optimizer == "muon" else 2
    return 4 * (p.trained + p.embedding + p.head) + 4 * moments * p.trained


@dataclass(frozen=True)
class TrainingMemory:
    """Memory of training, bytes on each device; `peak` is the sum of the others."""

    weights: int
    gradients: int
    optimizer: int
    logits: int
    activations: int
    batch: int
    peak: int


def training_memory(s: Shape, drafter: Drafter, aux: int, compute_bytes: int) -> TrainingMemory:
    """Memory of training; several devices do not lower it.

    float32 weights (the frozen embedding and both heads too), gradients and optimizer of the
    trained ones, the logits of every TTT step (sequence_length × vocabulary, with their float32
    softmax) and the teacher's, activations kept for the backward pass. `compute_bytes`: 2 for
    bf16, 4 on a CPU.
    """
    p = drafter_parameters(s, drafter, aux)
    tokens, steps = drafter.sequence_length, drafter.ttt_steps
    moments = 1 if drafter.optimizer == "muon" else 2
    kept = 14 * s.hidden + 3 * s.intermediate + (s.heads + 2 * s.kv_heads) * s.head_dim
    parts = (
        4 * (p.trained + p.embedding + 2 * p.head),
        4 * p.trained,
        4 * moments * p.trained,
        (steps + 1) * tokens * p.vocabulary * (compute_bytes + 4),
        steps * drafter.num_layers * tokens * kept * compute_bytes,
        tokens * (aux + 1) * s.hidden * compute_bytes,
    )
    return TrainingMemory(*parts, sum(parts))


def training_operations(p: DrafterParameters, ttt_steps: int, tokens: int) -> float:
    """Operations of training on `tokens`: per TTT step 6 a trained parameter (forward, gradients of
    inputs and weights), 4 for each one of the frozen head; 2 once for the teacher's head."""
    return tokens * (ttt_steps * (6.0 * p.trained + 4.0 * p.head) + 2.0 * p.head)
