"""The verifier's final norm, applied to and removed from last states [T, hidden]."""

import torch

from aerie.maintenance.foreign import RefusedFile
from aerie.states.teacher import Teacher


def final_norm(last: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """States after the verifier's final RMS norm: bf16 [T, hidden], computed in float32."""
    return teacher.normed(last).to(torch.bfloat16)


def _mean_square(last: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """Mean square of states divided by the norm's weight, [T]: 1 after the final norm.

    The mean square of x / rms(x) is 1, and dividing by the weight restores it. That of a residual
    stream is arbitrary.
    """
    return (last.float() / teacher.norm).pow(2).mean(-1)


def undo_final_norm(last: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """A state before the final norm that leads to the same logits: bf16 [T, hidden].

    The norm discards the length of the state; dividing by the weight gives its direction. The
    result has length sqrt(hidden), and norming it again gives the input up to bf16 rounding. That
    is enough, because training uses the last state only in lm_head(final_norm(h[n])).
    Raises `RefusedFile` for states that are not after the final norm.
    """
    if bool((teacher.norm == 0).any()):
        raise RefusedFile("the final norm cannot be undone", "some of its weights are zero")
    off = (_mean_square(last, teacher) - 1).abs().max().item()
    if off > 0.02:
        raise RefusedFile(
            "last states are not after the final norm",
            f"mean square of state / weight is up to {off:.2g} away from 1; "
            "expected --last-state before, another layer, or another verifier",
        )
    return (last.float() / teacher.norm).to(torch.bfloat16)


def refuse_normed(last: torch.Tensor, teacher: Teacher) -> None:
    """Raise `RefusedFile` for states that look as if they were after the final norm."""
    off = (_mean_square(last, teacher) - 1).abs()
    if len(last) >= 4 and bool((off < 0.02).all()):
        raise RefusedFile(
            "last states are after the final norm",
            "mean square of state / weight is 1 at every token; expected --last-state after-norm",
        )
