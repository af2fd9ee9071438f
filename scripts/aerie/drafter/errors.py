"""How a training fails."""

from aerie.common.errors import PermanentError


class TrainingFailed(PermanentError):
    """Training must not continue, or it ended without what it should have written."""
