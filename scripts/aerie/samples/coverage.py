"""How well a draft vocabulary fits, `vocabulary/<size>/coverage.json`. Light: the status page reads
it."""

from aerie.common.records import Record


class Coverage(Record):
    """How much of the target tokens a draft vocabulary covers. A target token is one that the
    drafter learns to predict."""

    size: int
    """Tokens of the draft vocabulary."""
    covered: float
    """Share of the target tokens that it covers."""
    target_tokens: int
    """Target tokens in the training samples."""
    seen: int
    """Distinct ids among them."""
    unseen: int
    """Ids of the draft vocabulary that never occur."""
    padded: int
    """Ids of the draft vocabulary beyond the tokenizer."""
    coverage: dict[str, float]
    """Size → share of the target tokens covered, for this and other sizes."""
    counts: str
    """Hash of the counts that the map was made from."""
    tokenizer: str
    """Hash of the tokenizer that the map belongs to."""
