"""The section `samples`."""

from typing import Annotated

from pydantic import Field

from aerie.config.section import Section


class Samples(Section):
    """How conversations become tokenized samples."""

    max_length: Annotated[int, Field(ge=16)] = 2048
    """Longest sample, tokens."""
    min_supervised_tokens: Annotated[int, Field(ge=1)] = 8
    """Samples with fewer supervised tokens are dropped and counted."""
    min_kept_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The stage fails when a smaller share of the records is kept."""
    supervise_reasoning: bool = True
    """In `keep` mode, train on reasoning as well as on the answers."""
    max_lost_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The stage fails when the chat template leaves something (tool calls, reasoning, a system
    turn) out of a larger share of the records."""
