"""What became of the records, `samples/report.json`. Light: the status page reads it."""

from pydantic import BaseModel, ConfigDict

from aerie.common.records import Record


class SplitSummary(BaseModel):
    """Lengths and supervised share of the samples of one split."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    samples: int
    """Number of samples."""
    tokens: int
    """Tokens of all samples."""
    supervised_tokens: int
    """Tokens on which a loss is taken."""
    supervised_share: float
    """`supervised_tokens` / `tokens`."""
    length: dict[str, float]
    """Tokens of a sample at `p10`, `p50`, `p90`, `p99` and `max`; empty without samples."""
    lengths: list[int]
    """Histogram: samples in each of 40 bins of length."""
    length_edges: list[float]
    """Edges of the bins, tokens."""


class SamplesReport(Record):
    """What became of the records of both splits."""

    records_in: int
    """Records that were read."""
    records_kept: int
    """Records with at least one sample; with all of `dropped` these are `records_in`."""
    dropped: dict[str, int]
    """Reason → records that yield no sample."""
    lost_by_template: dict[str, int]
    """What the chat template does not render (`tool_calls`, `system`, …) → records that have it."""
    examples: dict[str, list[str]]
    """Reason, or `the template loses: …` → up to three ids of records."""
    train: SplitSummary
    """The training samples."""
    heldout: SplitSummary
    """The held-out samples."""
    shards: int
    """Shards that the samples are cut into."""
