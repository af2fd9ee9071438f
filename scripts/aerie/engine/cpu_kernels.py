"""vLLM's compiled RMS norm for its engine on a CPU.

The CPU build of vLLM 0.32.0 holds the kernels but registers them for GPUs only; its norm in PyTorch
passes over the states a dozen times. Registered through vLLM's own `ir` (implementations of an
operation, by priority), for an engine in this process.
"""

import torch
from vllm import ir

PROVIDER = "cpu_c"
PRIORITY = {name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")}
"""For vLLM's option `ir_op_priority`: what the kernels do not take is done in PyTorch."""


def _takes(x, weight, epsilon, variance_size=None) -> bool:
    whole = variance_size is None and x.dim() == 2 and x.is_contiguous()
    return whole and weight is not None and weight.dtype == x.dtype


def _takes_sum(x, x_residual, weight, epsilon, variance_size=None) -> bool:
    return _takes(x, weight, epsilon, variance_size)


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """RMS norm of states [tokens, hidden]."""
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_sum)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of `x + x_residual` [tokens, hidden], and that sum.

    Not in place, as vLLM's fused kernel is: the residual stream that enters the first layer may be
    a state that is captured (layer id 0).
    """
    total = x + x_residual
    return rms_norm.impl_fn(total, weight, epsilon), total
