"""The section `engine`."""

from typing import Annotated, Literal

from pydantic import (
    Field,
)

from aerie.config.section import Section


class Engine(Section):
    """vLLM's engine, for generation, extraction and evaluation alike."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the verifier's weights and activations. `auto`: the checkpoint's own, but
    float32 on a CPU without bf16 arithmetic."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    """Sequences computed at the same time."""
    max_num_batched_tokens: Annotated[int, Field(ge=64)] = 4096
    """Tokens computed per step."""
    enforce_eager: bool = False
    """Skip compilation: it starts sooner and runs a little slower, right for small jobs."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs that share one engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for the engine."""
    cpu_cache_gib: Annotated[int, Field(ge=1)] = 2
    """Memory for the key-value cache on a machine without a GPU, GiB."""
