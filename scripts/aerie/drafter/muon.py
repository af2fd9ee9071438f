"""Muon's Newton-Schulz iteration for processors without bf16 arithmetic."""

import torch


def orthogonalize(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """The iteration in float32; shape as given.

    torch 2.13.0 iterates in bf16, which a CPU without bf16 arithmetic does in a scalar kernel, ten
    times slower. Source: Jordan et al., Muon (2024); the iteration of `torch.optim.Muon`.
    """
    a, b, c = coefficients
    tall = gradient.size(0) > gradient.size(1)
    x = gradient.float().T if tall else gradient.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
