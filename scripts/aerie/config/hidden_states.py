"""The section `hidden_states`."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from aerie.config.section import Section


class HiddenStates(Section):
    """The verifier's hidden states that the drafter is trained on."""

    aux_layer_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Layers that feed the drafter; id k is transformers' `hidden_states[k]`, the state entering
    layer k. The last layer's output is always added. null: 2, n//2, n-3 of n layers."""
    lanes: Annotated[int, Field(ge=1)] = 1
    """Extraction jobs side by side, each with an engine of its own."""
    samples_per_shard: Annotated[int, Field(ge=1)] = 64
    """Mean number of samples a shard; a cut depends on content, so sizes vary between a quarter
    and four times this."""
    format: Literal["lossless", "raw", "fp8"] = "lossless"
    """`lossless`: bit planes compressed, bit for bit. `raw`: uncompressed bf16. `fp8`: rounded to
    8 bits (e4m3) with a scale a token, then compressed; the drafter learns from rounded states."""
    last_state: Literal["all", "supervised"] = "all"
    """`supervised`: the last layer's states are kept only where a loss is taken (the training is
    the same bit for bit); other loss masks are then other shards."""
    min_kept_share: Annotated[float, Field(ge=0, le=1)] = 0.99
    """A lane fails when a smaller share of its samples could be extracted."""
    max_gib: Annotated[float, Field(gt=0)] | None = None
    """Most that all hidden states in the store may take, GiB; a job that would exceed it, or
    what is free on the disk, stops before it starts. null: only the disk is the limit."""

    @model_validator(mode="after")
    def _sorted(self) -> "HiddenStates":
        ids = self.aux_layer_ids
        if ids is not None and ids != sorted(set(ids)):
            raise ValueError(f"aux_layer_ids {ids} must be sorted and distinct: {sorted(set(ids))}")
        return self
