"""The measurements of a drafter, `evaluation/<name>/{acceptance,speed}.json`.

Light: the summary and the status page read them.
"""

from typing import Any

from pydantic import ConfigDict, Field

from aerie.common.records import Record


class AcceptanceSettings(Record):
    """What acceptance was measured with."""

    num_speculative_tokens: int
    """Tokens drafted per step of the verifier (K)."""
    max_prompts: int
    """Prompts per set, at most."""
    max_tokens: int
    """Longest answer, tokens."""
    max_length: int
    """Longest prompt and answer together, tokens."""
    temperature: float
    engine: dict[str, Any]
    """The section `engine` of the configuration."""


class PromptSetAcceptance(Record):
    """Acceptance on one set of prompts."""

    acceptance_length: float
    """1 + accepted / drafts: mean tokens per step of the verifier, its own token included."""
    acceptance_per_position: list[float]
    """Of each position k: share of drafts in which all tokens up to k were accepted."""
    num_drafts: int
    """Drafts that the verifier checked."""
    num_accepted_tokens: int
    """Drafted tokens that it accepted."""
    prompts: int
    generated_tokens: int


class Acceptance(PromptSetAcceptance):
    """`evaluation/<name>/acceptance.json`: the held-out prompts' acceptance, then every set's."""

    prompt_sets: dict[str, PromptSetAcceptance]
    """By name, `heldout` among them."""
    settings: AcceptanceSettings


class SpeedSettings(Record):
    """What speed was measured with."""

    num_speculative_tokens: int
    """Tokens drafted per step of the verifier (K)."""
    prompts: int
    max_tokens: int
    """Longest answer, tokens."""
    max_length: int
    """Longest prompt and answer together, tokens."""
    concurrency: list[int]
    """Requests at a time, one timing each."""
    temperature: float
    engine: dict[str, Any]
    """The section `engine` of the configuration."""


class Timing(Record):
    """All prompts answered at one concurrency."""

    concurrency: int
    """Requests at a time."""
    prompts: int
    generated_tokens: int
    seconds: float
    tokens_per_second: float
    time_per_output_token_s: float
    """Seconds per token of one request, mean over the requests: concurrency × seconds / tokens."""


class Speedup(Record):
    """With the drafter against without it, at one concurrency."""

    concurrency: int
    ratio: float
    """Tokens per second with the drafter / without it."""


class Speed(Record):
    """`evaluation/<name>/speed.json`: timings without and with the drafter."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    without: list[Timing]
    """By concurrency."""
    with_: list[Timing] = Field(validation_alias="with", serialization_alias="with")
    """By concurrency."""
    speedup: list[Speedup]
    """By concurrency."""
    settings: SpeedSettings
    machine: dict[str, Any]
    """The machine and the software (`common.machine.describe_machine`)."""
