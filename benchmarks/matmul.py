#!/usr/bin/env python3
"""Matrix products in float32 and bf16 on this machine's processor, in billions of operations/s.

Shapes are those of the demo's verifier (width 576 to 1,536) at 1, 64 and 1,024 tokens a step.

    python benchmarks/matmul.py
"""

import time

import torch
from common import record


def measure(tokens: int, dtype: torch.dtype, repeats: int = 20) -> float:
    x, weight = torch.randn(tokens, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
    for _ in range(3):
        torch.nn.functional.linear(x, weight)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.nn.functional.linear(x, weight)
    return 2 * tokens * 576 * 1536 * repeats / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    rows = []
    for tokens in (1, 64, 1024):
        full, half = measure(tokens, torch.float32), measure(tokens, torch.bfloat16)
        rows.append({"tokens": tokens, "float32": full, "bf16": half, "ratio": half / full})
    record("matmul", rows, bf16_arithmetic=torch.ops.mkldnn._is_mkldnn_bf16_supported())
