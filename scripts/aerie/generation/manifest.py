"""What the stage `generate_responses` did, `responses/manifest.json`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from aerie.common.errors import InputError
from aerie.common.records import Record
from aerie.generation.answers import AnswerStore, Sampling
from aerie.samples.stored_answer import StoredAnswer

if TYPE_CHECKING:  # imports pyarrow, which the status page does without
    from aerie.samples.shards import Splits


class AnswerCounts(Record):
    """What became of the records of a run."""

    records: int
    """Records to answer."""
    answers: int
    """Answers, one a turn."""
    truncated: int
    """Answers that were cut at `max_tokens`, or at the end of the window."""
    generated_tokens: int
    """Tokens of all answers."""
    not_answered: int
    """Records without an answer."""
    ended_early: int
    """Records of which only the first turns have an answer."""


class Captured(BaseModel):
    """Hidden states that were saved while the answers were generated."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    shards: int = 0
    """Shards written."""
    tokens: int = 0
    """Tokens in these shards."""
    failed: list[str] = Field(default=[])
    """Why states were not used, one text a shard; extraction makes these shards."""


class ResponsesManifest(AnswerCounts):
    """Where the answers of a run are, what they are and how they came about."""

    key: str
    """Folder of the answers in the store."""
    verifier: str
    """Fingerprint of the verifier."""
    sampling: Sampling
    """`temperature`, `top_p`, `max_tokens`, `max_length`, `seed`, `first_turn_only`, `model`
    (name on the servers, null for the job's own engine)."""
    reused: int
    """Records whose answers were in the store, or came from another run meanwhile."""
    generated: int
    """Records that this job answered."""
    captured: Captured
    """Hidden states saved in the same pass."""
    load_seconds: float
    """Time until the engine or the servers were ready, seconds."""
    seconds: float
    """Time of the whole job, seconds."""


def count_answers(answers: Iterable[StoredAnswer]) -> AnswerCounts:
    answers = list(answers)
    finishes = [finish for answer in answers for finish in answer.finishes]
    return AnswerCounts(
        records=len(answers),
        answers=len(finishes),
        truncated=sum(finish == "length" for finish in finishes),
        generated_tokens=sum(answer.generated_tokens for answer in answers),
        not_answered=sum(answer.dropped is not None for answer in answers),
        ended_early=sum(answer.ended is not None for answer in answers),
    )


def load_answers(manifest: Path, store: Path, splits: "Splits") -> dict[str, StoredAnswer]:
    """The answers that the manifest in this file promises, by record id; `InputError` if one of
    them is no longer in the store."""
    wanted = {record["id"] for records in splits.values() for record in records}
    answers = AnswerStore(store, ResponsesManifest.read(manifest).key).load(wanted)
    if missing := wanted - answers.keys():
        raise InputError(
            f"{manifest}: the answers to {len(missing)} records are no longer in the store, among "
            f"them record {min(missing)}; delete that file and run again to generate them"
        )
    return answers
