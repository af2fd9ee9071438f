"""vLLM's compiled RMS norm for its engine on a CPU.

The CPU build of vLLM 0.32.0 contains the kernels but registers them for GPUs only; its norm in
PyTorch passes over the states a dozen times. Importing this module registers the kernels through
vLLM's `ir` (implementations of an operation, by priority) for an engine in this process.
"""

import torch
from vllm import ir

PROVIDER = "cpu_c"
PRIORITY = {name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")}
"""For vLLM's option `ir_op_priority`: PyTorch handles what the kernels do not support."""


def _supports(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    whole = variance_size is None and x.dim() == 2 and x.is_contiguous()
    return whole and weight is not None and weight.dtype == x.dtype


def _supports_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _supports(x, weight, epsilon, variance_size)


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_supports)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """RMS norm of states [tokens, hidden]."""
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_supports_sum)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of `x + x_residual` [tokens, hidden], and the sum itself.

    Unlike vLLM's fused kernel this does not work in place: the residual stream that enters the
    first layer may be captured (layer id 0).
    """
    total = x + x_residual
    return rms_norm.impl_fn(total, weight, epsilon), total
