"""What an engine is given and what it returns; both kinds of engine satisfy `VerifierEngine`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from aerie.common.errors import EngineError


@dataclass
class Request:
    """A prompt as token ids, and the largest number of tokens to generate.

    `end_ids`: tokens that end the answer, besides the verifier's own; the answer includes the one
    that ended it.
    """

    key: str
    prompt: list[int]
    max_tokens: int
    end_ids: tuple[int, ...] = ()


@dataclass
class Answer:
    """The answer to a request.

    `tokens`: generated ids, including the one that ended the answer. `finish`: vLLM's reason,
    `stop` or `length`. `states`: file of the captured states; None if nothing is captured.
    """

    key: str
    prompt: list[int]
    tokens: list[int]
    finish: str
    states: Path | None


@dataclass
class Failure(Answer):
    """Takes the place of an answer. `reason`: why there is none, or, if it has tokens, why its
    states are missing."""

    reason: str


@dataclass
class Refused(Failure):
    """A request that a server did not answer. `again`: another run may get an answer."""

    again: bool


class EngineDied(EngineError):
    """The engine cannot continue; requests in flight have no answer."""


class VerifierEngine(Protocol):
    """The verifier, ready to answer. `max_model_len`: longest prompt with its answer, tokens."""

    max_model_len: int

    def run(
        self,
        requests: Iterator[Request | None],
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: Callable[[str], int] | None = None,
        concurrency: int | None = None,
    ) -> Iterator[Answer]:
        """Answer requests in the order in which they finish.

        `requests` is consumed lazily, `concurrency` at a time, so a caller may add to its source
        while it takes the answers. If the source yields None it is asked again later, until no
        request is in flight. `seed` maps a request's key to its seed. A request that cannot be
        answered yields a `Failure`. Raises `EngineError` when the engine cannot continue.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
