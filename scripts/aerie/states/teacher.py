"""The teacher: proof that captured states lead to the tokens that the verifier chose."""

from pathlib import Path

import torch

from aerie.common.errors import InputError, UnusableStates
from aerie.common.machine import processor_computes_bf16
from aerie.verifier.checkpoint import text_config

ENOUGH_SAMPLES = 8
"""Samples with the same fault in a shard from which on the fault is not theirs."""

ENOUGH_TOKENS = 32
"""Tokens that are judged together where there are fewer samples: of several small shards, or of
the ends of answers."""


class Teacher:
    """The verifier's output head: logits = lm_head(final_norm(h[n])).

    The head multiplies in its own bf16 where the processor supports that, else in float32. bf16
    takes a quarter of the time, which matters because the engine shares the cores.
    Source of the convention: transformers' `LlamaForCausalLM`.
    """

    def __init__(self, model: Path):
        from speculators.utils.loading import load_model_layers

        names = ["model.norm.weight", "lm_head.weight", "embed_tokens.weight"]
        weights: dict[str, torch.Tensor] = load_model_layers(names, str(model))
        config = text_config(model)
        head = weights.get("lm_head.weight", weights.get("embed_tokens.weight"))
        if head is None or "model.norm.weight" not in weights:
            raise InputError(f"{model}: found no output head or final norm among its weights")
        fast = head.dtype == torch.bfloat16 and processor_computes_bf16()
        self.head = head if fast else head.float()
        self.norm = weights["model.norm.weight"].float()
        self.eps: float = getattr(config, "rms_norm_eps", 1e-6)

    def normed(self, last_states: torch.Tensor) -> torch.Tensor:
        """States [T, hidden] after the final norm (RMS norm), float32."""
        x = last_states.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm

    def ranks(self, last_states: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """How many tokens the head prefers to the chosen one: int64 [T], 0 for the best.

        `last_states` [T, hidden], `next_tokens` [T]. Where the head prefers no token to another
        (states that are zero, NaN, or so large that their squares overflow), the chosen one
        ranks last.
        """
        logits = self.normed(last_states).to(self.head.dtype) @ self.head.T
        chosen = logits.gather(1, next_tokens.long()[:, None])
        prefers = (logits < chosen).any(1)
        return torch.where(prefers, (logits > chosen).sum(1), len(self.head))

    def check(self, states: torch.Tensor, next_tokens: list[int], greedy: bool) -> None:
        """Raise `UnusableStates` unless the last states of the final `len(next_tokens)` positions
        lead to the tokens that the verifier chose after them (`judge_ranks`)."""
        if next_tokens:
            places = _spread(len(next_tokens))
            last, chosen = states[-len(next_tokens) :, -1], torch.tensor(next_tokens)
            judge_ranks(self.ranks(last[places], chosen[places]), greedy)


def _spread(count: int) -> torch.Tensor:
    """At most 64 positions, spread over all: int64."""
    return torch.linspace(0, count - 1, min(count, 64)).round().long()


def judge_ranks(ranks: torch.Tensor, greedy: bool) -> None:
    """Raise `UnusableStates` when these `Teacher.ranks` are not those of the tokens' own states.

    At most 64 of them are judged, spread over all. In bf16 a near tie may fall either way. So
    nine tenths must be among the best five, none beyond the best hundred, and of eight or more
    four fifths must be the best; two samples that changed places still fail. Sampled tokens must
    only be likely.
    """
    ranks = ranks[_spread(len(ranks))]
    limit = 5 if greedy else 1000
    agree = (ranks == 0).float().mean().item()
    if (ranks < limit).float().mean().item() < 0.9 or (
        greedy and (int(ranks.max()) >= 100 or (len(ranks) >= 8 and agree < 0.8))
    ):
        raise UnusableStates(
            "lm_head(final_norm(last states)) does not lead to the tokens that the verifier "
            f"chose: {agree:.0%} agree, worst rank {int(ranks.max())}; the layer ids or the "
            "final-norm convention are shifted, or this is another model"
        )


def find_mismatched_samples(
    teacher: Teacher, samples: list[tuple[str, torch.Tensor, list[int]]], greedy: bool
) -> dict[str, str]:
    """Samples whose last states do not lead to the tokens that the verifier chose: id → reason.

    `samples`: id, states [T, ids, hidden], and the tokens that followed its last positions.
    Raises `UnusableStates` when so many disagree that the samples cannot be at fault.
    """
    if not samples:
        return {}
    last = torch.cat([states[-len(chosen) :, -1] for _, states, chosen in samples])
    tokens = [token for *_, chosen in samples for token in chosen]
    ranks = teacher.ranks(last, torch.tensor(tokens))
    # Unrelated states give the token any rank; one in a thousand is luck.
    limit = (
        min(100, max(5, len(teacher.head) // 1000))
        if greedy
        else max(1000, len(teacher.head) // 20)
    )
    found, fine = {}, []
    own_ranks = torch.split(ranks, [len(chosen) for *_, chosen in samples])
    for (identity, *_), own in zip(samples, own_ranks, strict=True):
        if (own >= limit).float().mean() > 0.5:
            found[identity] = (
                "lm_head(final_norm(last state)) does not lead to the token that the verifier "
                f"chose: {int(own.max())} tokens come before it"
            )
        else:
            fine.append(own)
    if len(found) >= ENOUGH_SAMPLES and len(found) > len(samples) / 2:
        judge_ranks(ranks, greedy)  # its message is better, where it applies
        raise UnusableStates(next(iter(found.values())) + f", and so in {len(found)} samples")
    if len(fine) >= ENOUGH_SAMPLES or sum(map(len, fine)) >= ENOUGH_TOKENS:
        judge_ranks(torch.cat(fine), greedy)
    return found
