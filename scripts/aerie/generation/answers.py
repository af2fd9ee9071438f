"""The store of answers: what determines an answer, and where it is kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from aerie.common.files import digest
from aerie.common.versions import RESPONSES_VERSION
from aerie.config import Generation, Samples
from aerie.generation.record_files import RecordFiles
from aerie.samples.stored_answer import StoredAnswer


@dataclass(frozen=True)
class Sampling:
    """How the verifier answers; `max_tokens` an answer, `max_length` the whole sample, tokens.

    `first_turn_only`: what follows the first user turn is left out. `model`: name of the model
    on the servers that answer, None for the job's own engine.
    """

    temperature: float
    top_p: float
    max_tokens: int
    max_length: int
    seed: int
    first_turn_only: bool = False
    model: str | None = None

    @classmethod
    def of(cls, generation: Generation, samples: Samples, served: str | None = None) -> Self:
        """The sampling that the configuration asks for.

        `served`: the model that the endpoints serve, used if `endpoint_model` names none.
        """
        return cls(
            generation.temperature,
            generation.top_p,
            generation.max_tokens,
            samples.max_length,
            generation.seed,
            generation.first_turn_only,
            (generation.endpoint_model or served) if generation.endpoints else None,
        )

    def key(self, fingerprint: str) -> str:
        """Name of the folder with the answers of this verifier under these settings."""
        relevant = {**vars(self)}
        if self.temperature == 0:
            del relevant["seed"], relevant["top_p"]
        # Left out when unset, so that earlier answers keep their place.
        for name in ("first_turn_only", "model"):
            if not relevant[name]:
                del relevant[name]
        return digest(RESPONSES_VERSION, fingerprint, relevant)[:16]


class AnswerStore(RecordFiles[StoredAnswer]):
    """Answers by the id of their record, under one `Sampling.key`."""

    def __init__(self, root: Path, key: str):
        super().__init__(root / "answers" / key, StoredAnswer)

    def replaces(self, record: StoredAnswer) -> bool:
        """An answer that is to be asked for again gives way to any other."""
        return not record.again
