"""`prompts/report.json`: what became of every record."""

from typing import Any

from pydantic import Field

from aerie.common.records import Record

EXAMPLES = 3
"""Examples shown for each reason."""


class Tally(Record):
    """What became of the records of one source."""

    path: str
    """The source's path as configured."""
    records_in: int = 0
    """Records read."""
    records_kept: int = 0
    """Records kept."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Reason → records dropped for it."""
    changed: dict[str, int] = Field(default_factory=dict)
    """What was changed → records kept with this change."""
    layouts: dict[str, int] = Field(default_factory=dict)
    """Layout → usable records that have it."""
    examples: dict[str, list[dict[str, str]]] = Field(default_factory=dict)
    """Reason → up to three dropped records: `file`, `place` in it, `record` (its id in the file),
    `id`, `detail`."""

    def drop(self, reason: str, **example: Any) -> None:
        """Count a record that is not kept; `example` says which one (file, place, id, detail)."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append({k: without_surrogates(v)[:400] for k, v in example.items() if v})


class EvaluationSet(Record):
    """A prompt set that training records were compared with."""

    prompts: int
    """Prompts in the set."""
    records_dropped: int
    """Records dropped because they overlap the set."""


class PromptsReport(Record):
    """What `collect_prompts` read, kept and dropped."""

    mode: str
    """`generate` or `keep`, as configured."""
    records_in: int
    """Records read. Reading stops at a `limit`; records after it are not counted."""
    records_kept: int
    """Records written; with those in `dropped` exactly `records_in`."""
    kept_share: float
    """Share by which the floor is judged: duplicates do not count as loss."""
    train: int
    """Records for training."""
    heldout: int
    """Records held out."""
    heldout_share: float
    """As configured."""
    dropped: dict[str, int]
    """Reason → records dropped, most frequent first."""
    changed: dict[str, int]
    """What was changed → records kept with this change, most frequent first."""
    warnings: list[str]
    """Messages for the user."""
    evaluation_sets: dict[str, EvaluationSet]
    """Prompt sets that training records were compared with, by name."""
    sources: dict[str, Tally]
    """The same counts by source, with layouts and examples."""


def without_surrogates(value: Any) -> str:
    """`value` as text that can be written as UTF-8."""
    return str(value).encode("utf-8", "backslashreplace").decode()
