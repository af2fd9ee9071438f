"""The section `self_prompts`."""

from typing import Annotated

from pydantic import Field

from aerie.config.section import Section


class SelfPrompts(Section):
    """Prompts that the verifier writes itself, one more source of the corpus (`self`)."""

    number: Annotated[int, Field(ge=0)] = 0
    """Number of prompts; 0: off."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Nucleus sampling; a smaller value keeps unlikely words out."""
    max_tokens: Annotated[int, Field(ge=4)] = 256
    """Longest prompt, tokens; one that has not ended by then is dropped and counted."""
    seed: int = 0
    """Seed of sampling; the seed of every attempt is derived from it."""
    min_letter_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Prompts with a smaller share of ASCII letters among their characters (without white space)
    are dropped and counted; set it to 0 for languages in other scripts."""
