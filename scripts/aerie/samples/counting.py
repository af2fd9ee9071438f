"""Counting what becomes of the records while they are tokenized."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from aerie.samples.file import TokenizedSample
from aerie.samples.report import SamplesReport, SplitSummary

EXAMPLES = 3
"""Records named for each reason."""


class RecordCounter:
    """Counts records as they are tokenized."""

    def __init__(self) -> None:
        self.records = 0
        self.kept = 0
        self.incomplete = 0
        self.dropped: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def drop(self, record: str, reason: str) -> None:
        self.dropped[reason] += 1
        self._show(record, reason)

    def lose(self, record: str, parts: Sequence[str]) -> None:
        """Count the parts of a record that the chat template does not render."""
        self.incomplete += bool(parts)
        for part in parts:
            self.lost[part] += 1
            self._show(record, f"the template loses: {part}")

    def _show(self, record: str, reason: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(record)

    def report(self, samples: Sequence[TokenizedSample], shards: int) -> SamplesReport:
        return SamplesReport(
            records_in=self.records,
            records_kept=self.kept,
            dropped=dict(self.dropped.most_common()),
            lost_by_template=dict(self.lost.most_common()),
            examples=self.examples,
            train=summarize([s for s in samples if s.split == "train"]),
            heldout=summarize([s for s in samples if s.split == "heldout"]),
            shards=shards,
        )


def summarize(samples: Sequence[TokenizedSample]) -> SplitSummary:
    lengths = np.array([len(s.input_ids) for s in samples], dtype=np.int64)
    tokens = int(lengths.sum())
    supervised = sum(sum(s.loss_mask) for s in samples)
    length: dict[str, float] = {}
    counts, edges = [], []
    if samples:
        for name, q in (("p10", 10), ("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
            length[name] = float(np.percentile(lengths, q))
        counts, edges = (part.tolist() for part in np.histogram(lengths, bins=40))
    return SplitSummary(
        samples=len(samples),
        tokens=tokens,
        supervised_tokens=supervised,
        supervised_share=supervised / max(1, tokens),
        length=length,
        lengths=counts,
        length_edges=edges,
    )
