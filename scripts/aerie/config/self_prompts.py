"""The section `self_prompts`."""

from typing import Annotated

from pydantic import (
    Field,
    model_validator,
)

from aerie.config.section import Section


class SelfPrompts(Section):
    """Prompts that the verifier writes itself, one more source of the corpus (`self`)."""

    number: Annotated[int, Field(ge=0)] = 0
    """Prompts wanted; 0: off."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Nucleus sampling; a smaller value keeps unlikely words out."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest prompt, tokens; one that has not ended by then is dropped and counted."""
    min_tokens: Annotated[int, Field(ge=1)] = 4
    """Shorter prompts are dropped and counted, tokens."""
    seed: int = 0
    """Seed of sampling; every attempt has its own, made from it."""
    max_attempts: Annotated[float, Field(ge=1)] = 5.0
    """Attempts for each wanted prompt, at most; the stage fails when they do not suffice."""
    min_letter_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Prompts with a smaller share of ASCII letters among their characters (white space left out)
    are dropped and counted; 0: any language."""
    max_repeated_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Prompts in which a larger share of the lines, or of the runs of 3 words, was there before
    are dropped and counted."""
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = 0.8
    """Similarity (Jaccard, of runs of 3 words) from which two prompts count as near duplicates, of
    which the first is kept; null: off."""

    @model_validator(mode="after")
    def _lengths(self) -> "SelfPrompts":
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}"
            )
        return self
