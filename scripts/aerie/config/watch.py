"""The section `watch`."""

from typing import Annotated, Literal

from pydantic import (
    Field,
)

from aerie.config.section import Section


class StageWatch(Section):
    """Limits that differ in one stage, named as its rule is."""

    stall_seconds: Annotated[float, Field(gt=0)] | None = None
    """As in `watch`, for this stage, seconds (null: as there)."""
    load_seconds: Annotated[float, Field(gt=0)] | None = None
    """As in `watch`, for this stage, seconds (null: as there)."""


WatchedStage = Literal[
    "write_prompts",
    "generate_responses",
    "extract_hidden_states",
    "train_drafter",
    "measure_acceptance",
    "measure_speed",
]


class Watch(Section):
    """When a long job is stopped because it does not get on. No change here reruns anything."""

    stall_seconds: Annotated[float, Field(gt=0)] = 60.0
    """A job that shows no progress for this long, or for `stall_gaps` times its own usual gap
    between two signs of progress where that is longer, has stalled, seconds."""
    stall_gaps: Annotated[float, Field(ge=1)] = 10.0
    """See `stall_seconds`; the usual gap is learnt from the job itself."""
    load_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """The same while a model is loaded or compiled, until the first steps were made, and while a
    job validates, saves or ends or endpoints answer, seconds."""
    stages: dict[WatchedStage, StageWatch] = {}
    """Other limits by stage, such as `train_drafter: {stall_seconds: 300}`."""
    grace_seconds: Annotated[float, Field(ge=0)] = 30.0
    """From asking a stopped job's processes to end until they are killed, seconds."""
    min_free_gib: Annotated[float, Field(ge=0)] = 1.0
    """A job is stopped when a disk it writes to has less free space, GiB."""
    loss_spike: Annotated[float, Field(gt=1)] = 3.0
    """A loss this many times the median of the 50 seen before is a warning."""
    loss_divergence: Annotated[float, Field(gt=1)] = 1.5
    """A mean over 50 losses this many times the lowest so far is a warning."""
    stop_on_divergence: bool = False
    """Stop the training then."""
