"""The section `evaluation`."""

from typing import Annotated

from pydantic import (
    Field,
)

from aerie.config.section import Name, Section


class Evaluation(Section):
    """How a drafter served by vLLM is measured."""

    num_speculative_tokens: Annotated[int, Field(ge=1)] = 3
    """Tokens drafted per step of the verifier (K)."""
    prompt_sets: dict[Name, str] = {}
    """Benchmark prompt files by name, beside the held-out prompts."""
    max_prompts: Annotated[int, Field(ge=1)] = 80
    """Prompts measured per set, at most."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Longest answer, tokens."""
    concurrencies: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = [1]
    """Requests at a time when speed is measured."""
    speed_prompts: Annotated[int, Field(ge=1)] = 32
    """Held-out prompts used for measuring speed."""
