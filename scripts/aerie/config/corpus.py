"""The section `corpus`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from aerie.config.section import Section


class Source(Section):
    """One source of prompts or conversations."""

    path: str
    """File, folder or glob pattern; `hf:ID` for a Hugging Face dataset."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use at most this many records (null: all)."""
    name: str | None = None
    """Short name in records and reports (null: from the path)."""
    column: str | None = None
    """Column or key that holds the prompt or the messages (null: found by the layout)."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset (null: its default)."""
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the records that is used, chosen by content so that the choice is stable."""


class Corpus(Section):
    """What the drafter is trained on."""

    sources: list[Source] = [Source(path="resources/prompts/*.jsonl")]
    """Files to read; plain text is short for `{path: …}`. May be empty when the verifier writes
    prompts itself (`self_prompts`)."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first records, in the order of the sources (null: all)."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = 0.08
    """Share of the prompts kept out of training, chosen by content: a prompt stays on its side when
    the corpus grows."""
    min_kept_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The stage fails when a smaller share of the records is kept; duplicates count as kept."""
    on_bad_record: Literal["stop", "drop"] = "stop"
    """What to do with a record that is damaged or fits no layout: `stop` with a message, or `drop`
    and count it."""
    on_unknown_role: Literal["stop", "drop"] = "stop"
    """What to do with a record that has an unknown role: `stop` with a message, or `drop` and
    count it."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Further role names and what they mean, in addition to the built-in table."""
    max_characters: Annotated[int, Field(ge=1)] = 1_000_000
    """Longer conversations are dropped and counted, characters of text."""
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = 0.8
    """Similarity (Jaccard, of runs of 3 words) from which two conversations are near duplicates,
    of which the first is kept. For corpora of at least 10,000 records; null: off."""
    decontaminate: bool = True
    """Drop training records that share 13 words in a row with a prompt of `evaluation.prompt_sets`,
    or have a shorter one as a user turn. A changed prompt set then reruns everything from
    `collect_prompts` on."""

    @model_validator(mode="before")
    @classmethod
    def _short_sources(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("sources"), list):
            sources = [{"path": s} if isinstance(s, str) else s for s in data["sources"]]
            return {**data, "sources": sources}
        return data
