"""The section `watch`."""

from typing import Annotated, Literal

from pydantic import Field

from aerie.config.section import Section


class StageWatch(Section):
    """Limits of one stage, named after its rule."""

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
    """When a long job is stopped because it makes no progress. No change here reruns anything."""

    stall_seconds: Annotated[float, Field(gt=0)] = 60.0
    """A job has stalled when it shows no progress for this long, or for ten times its own usual gap
    between two signs of progress if that is longer, seconds."""
    load_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """The same while a model is loaded or compiled, until the first steps are done, and while a
    job validates, saves or ends or endpoints answer, seconds."""
    stages: dict[WatchedStage, StageWatch] = {}
    """Other limits for a stage, such as `train_drafter: {stall_seconds: 300}`."""
    grace_seconds: Annotated[float, Field(ge=0)] = 30.0
    """How long a stopped job's processes may take to end before they are killed, seconds."""
    min_free_gib: Annotated[float, Field(ge=0)] = 1.0
    """A job is stopped when a disk it writes to has less free space, GiB."""
    stop_on_divergence: bool = False
    """Stop a training whose loss grows: its mean over 50 steps is 1.5 times the lowest so far
    (otherwise that is a warning)."""
