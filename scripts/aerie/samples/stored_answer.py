"""An answer as the store keeps it: generation writes it, tokenization reads it."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from aerie.common.records import Record


class AnswerTokens(BaseModel):
    """Tokens of one rendering of a conversation."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    ids: list[int] = Field(default=[])
    """All token ids, prompt and answers, as the verifier read and wrote them."""
    spans: list[tuple[int, int]] = Field(default=[])
    """[start, end) of each answer in `ids`."""


class StoredAnswer(Record):
    """The verifier's answers to one conversation, or the reason why there are none."""

    id: str
    """Id of the record that was answered."""
    samples: list[AnswerTokens] = Field(default=[])
    """More than one if the chat template renders earlier turns differently later on."""
    finishes: list[str] = Field(default=[])
    """vLLM's finish reason of each turn: `stop` or `length`."""
    texts: list[str] = Field(default=[])
    """Text of each answer."""
    dropped: str | None = None
    """Why there is no answer at all. Absent if there is one."""
    ended: str | None = None
    """Why only the first turns have an answer. Absent if all have one."""
    again: bool = False
    """The server failed or refused, and the next run asks again. Absent if false."""

    @property
    def generated_tokens(self) -> int:
        return sum(end - start for sample in self.samples for start, end in sample.spans)

    def as_json(self) -> dict[str, Any]:
        answered: dict[str, Any] = {"samples": [], "finishes": [], "texts": []}
        given = self.model_dump(mode="json", exclude_defaults=True)
        return given if self.dropped else {**answered, **given}
