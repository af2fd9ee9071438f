"""Conversations with the verifier, turn by turn."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aerie.chat.template import ChatTemplate
from aerie.chat.unverified import Unverified
from aerie.engine.protocol import Answer, Failure, Refused, Request, VerifierEngine
from aerie.generation.answers import Sampling
from aerie.samples.stored_answer import AnswerTokens, StoredAnswer


class Dialogue:
    """One record while it is answered: its user turns are asked one by one, with the verifier's
    answers between them.

    `samples`: the tokens so far. A template that renders earlier turns differently later on starts
    a new one.
    """

    def __init__(self, record: dict[str, Any], template: ChatTemplate, sampling: Sampling):
        self.record, self.template, self.sampling = record, template, sampling
        self.pending = [m for m in record["messages"] if m["role"] != "assistant"]
        if sampling.first_turn_only:
            turns = [i for i, m in enumerate(self.pending) if m["role"] == "user"]
            self.pending = self.pending[: turns[0] + 1] if turns else []
        self.messages: list[dict[str, Any]] = []
        self.samples: list[AnswerTokens] = []
        self.texts: list[str] = []
        self.finishes: list[str] = []
        self.dropped: str | None = None
        self.ended: str | None = None
        self.again = False

    def next_request(self) -> Request | None:
        """The next turn to answer, None when the dialogue has ended."""
        if not any(m["role"] == "user" for m in self.pending):
            return None
        while self.pending:
            message = self.pending.pop(0)
            self.messages.append(message)
            if message["role"] == "user":
                break
        tools = self.record.get("tools")
        try:
            prompt = None
            if self.samples:
                prompt = self.template.next_prompt_ids(self.messages, self.samples[-1].ids, tools)
            continues = prompt is not None
            if prompt is None:
                prompt = self.template.prompt_ids(self.messages, tools)
        except Unverified as error:
            self._end(f"the chat template refuses it: {error}")
            return None
        room = min(self.sampling.max_tokens, self.sampling.max_length - len(prompt))
        if room < 2:
            self._end("prompt fills the window")
            return None
        if not continues:
            self.samples.append(AnswerTokens())
        return Request(f"{self.record['id']}:{len(self.finishes)}", prompt, room)

    def take(self, answer: Answer) -> None:
        """Add the answer to the last request."""
        if isinstance(answer, Failure) and not answer.tokens:
            if not self.samples[-1].spans:
                self.samples.pop()
            self.again = isinstance(answer, Refused) and answer.again
            self._end(answer.reason)
            return
        ids = answer.prompt + answer.tokens
        self.samples[-1].spans.append((len(answer.prompt), len(ids)))
        self.samples[-1].ids = ids
        self.finishes.append(answer.finish)
        text = self.template.decode(answer.tokens)
        self.texts.append(text)
        self.messages.append({"role": "assistant", "content": text})

    def _end(self, reason: str) -> None:
        self.pending = []
        self.ended = reason
        if not self.finishes:
            self.dropped = reason

    def stored(self) -> StoredAnswer:
        """What the store keeps of it."""
        if self.dropped:
            return StoredAnswer(id=self.record["id"], dropped=self.dropped, again=self.again)
        return StoredAnswer(
            id=self.record["id"],
            samples=self.samples,
            finishes=self.finishes,
            texts=self.texts,
            ended=self.ended,
            again=self.again,
        )


def never() -> bool:
    return False


def converse(
    engine: VerifierEngine,
    records: Iterable[dict[str, Any] | None],
    template: ChatTemplate,
    sampling: Sampling,
    hold: Callable[[], bool] = never,
) -> Iterator[tuple[Dialogue, Answer | None]]:
    """Run all dialogues with the engine at once; yield each when it has ended.

    With it comes the answer to its last turn, None if nothing could be asked. `records` is drawn
    from lazily; a None among them means "none now" while other dialogues are running. While
    `hold()` is true no dialogue begins if others are running.
    """
    waiting = iter(records)
    ready: deque[Request] = deque()
    running: dict[str, Dialogue] = {}
    unasked: list[Dialogue] = []

    def requests() -> Iterator[Request | None]:
        while True:
            while not ready and not (running and hold()):
                record = next(waiting, None)
                if record is None:
                    break
                dialogue = Dialogue(record, template, sampling)
                request = dialogue.next_request()
                if request is None:
                    unasked.append(dialogue)
                else:
                    running[dialogue.record["id"]] = dialogue
                    ready.append(request)
            yield ready.popleft() if ready else None

    answers = engine.run(
        requests(),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=lambda key: _seed(sampling.seed, key),
    )
    for answer in answers:
        while unasked:
            yield unasked.pop(), None
        dialogue = running[answer.key.split(":")[0]]
        dialogue.take(answer)
        request = dialogue.next_request()
        if request is not None:
            if answer.states is not None:
                answer.states.unlink()  # the last turn's states include these
            ready.append(request)
            continue
        del running[dialogue.record["id"]]
        yield dialogue, answer
    while unasked:
        yield unasked.pop(), None


def _seed(seed: int, key: str) -> int:
    """A seed for each request, independent of what it is batched with."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=4).digest())
