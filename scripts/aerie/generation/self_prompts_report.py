"""What the stage `write_prompts` did, `prompts/self.json`."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from aerie.common.records import Record


class DroppedAttempt(BaseModel):
    """An attempt that was dropped."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    attempt: int
    """Its number."""
    text: str
    """What was written, cut after 300 characters."""
    detail: str
    """More about the reason."""


class SelfPromptsReport(Record):
    """What became of the attempts up to the one that gave the last prompt."""

    key: str
    """Folder of the attempts in the store."""
    verifier: str
    """Fingerprint of the verifier."""
    settings: dict[str, Any]
    """The section `self_prompts`."""
    attempted: int
    """Attempts; `kept` and the counts of `dropped` add up to it."""
    kept: int
    """Prompts."""
    dropped: dict[str, int]
    """Reason → attempts."""
    tokens: int
    """Tokens of the prompts."""
    asked: int
    """Attempts that this job made. The others were in the store; some may be spare ones."""
    examples: dict[str, list[DroppedAttempt]]
    """Reason → up to three attempts."""
    seconds: float
    """Time of the whole job, seconds."""
