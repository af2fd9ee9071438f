"""The section `generation`."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from aerie.config.section import Section, Url


class Generation(Section):
    """How the verifier answers the prompts."""

    mode: Literal["generate", "keep"] = "generate"
    """`generate`: the verifier answers (on-policy, best acceptance). `keep`: the corpus's own
    answers are used."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Longest answer, tokens; longer ones are cut and counted."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; without effect at temperature 0."""
    seed: int = 0
    """Seed of sampling."""
    capture: bool = True
    """Save the hidden states while the answers are generated: one model load and no second
    prefill. Ignored with `endpoints`, which give no states: the extraction makes them."""
    first_turn_only: bool = False
    """Answer only the first user turn of each conversation and ignore the rest."""
    endpoints: list[Url] = []
    """Base URLs of OpenAI-compatible servers of the verifier (vLLM, SGLang), such as
    `http://host:8000/v1`, used in parallel; empty: the job's own engine. The API key is read
    from the environment variable `AERIE_API_KEY` only."""
    endpoint_model: str | None = None
    """Name of the model at the endpoints (null: the server's first). Its answers are kept apart
    from the engine's."""
    endpoint_concurrency: Annotated[int, Field(ge=1)] = 32
    """Concurrent requests per endpoint."""

    @field_validator("endpoints")
    @classmethod
    def _distinct(cls, urls: list[str]) -> list[str]:
        if len(set(urls)) < len(urls):
            raise ValueError(f"the same endpoint twice in {urls}")
        return urls
