"""A lane with a stand-in for the engine and the teacher, so that each fault can be forced."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from aerie.common.progress import JobProgress
from aerie.engine.protocol import Answer, Failure, Request
from aerie.extraction.run import describe_lane, extract
from aerie.extraction.work import LaneWork
from aerie.samples.file import TokenizedSample
from aerie.samples.shards import ShardPlan, plan_shard
from aerie.states.convention import Convention
from aerie.states.ids import sample_key
from aerie.states.shard import Shard
from aerie.states.store import Store

IDS, WIDTH, VOCABULARY = (1, 2, 4), 16, 64
CONVENTION = Convention("f" * 32, IDS, WIDTH)
HEAD = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9))

Spoil = Callable[[int, str, torch.Tensor], torch.Tensor | str]


def make_samples(count: int, start: int = 0) -> list[TokenizedSample]:
    """Samples of different tokens and lengths."""
    found = []
    for number in range(start, start + count):
        generator = np.random.default_rng(number)
        ids = generator.integers(1, VOCABULARY, int(generator.integers(4, 12))).tolist()
        ids[0] = number % VOCABULARY
        ids[1] = number // VOCABULARY
        found.append(
            TokenizedSample(f"s{number}", f"s{number}", "x", "train", ids, [True] * len(ids), 1, -1)
        )
    return found


def true_states(tokens: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(sample_key(tokens)[:8], 16))
    return torch.randn(len(tokens), len(IDS), WIDTH, generator=generator).to(torch.bfloat16)


def nearly(state: torch.Tensor) -> torch.Tensor:
    """A last state that leads to the second best token, and to the best one next."""
    best, other = HEAD[(state.float() @ HEAD.T).topk(2).indices]
    return (10 * other / other.dot(other) + 9 * best / best.dot(best)).bfloat16()


def keep(number: int, key: str, states: torch.Tensor) -> torch.Tensor:
    """The `spoil` that spoils nothing."""
    return states


class FakeTeacher:
    """An output head without a norm; its token for a state is the best one."""

    head = HEAD

    def ranks(self, last, tokens):
        logits = last.float() @ HEAD.T
        return (logits > logits.gather(1, tokens[:, None])).sum(1)


class FakeEngine:
    """A `VerifierEngine` that answers with one token, and gives `true_states` or what
    `spoil(answer number, key, states)` makes of them.

    `spoil` may return a text (a failure), states, or raise. `started`: how often it was started.
    `asked`: keys of all requests. `alone`: keys of requests computed without others. `flying`:
    other requests in flight.
    """

    max_model_len = 100

    def __init__(self, folder: Path, spoil: Spoil = keep):
        self.folder, self.spoil = folder, spoil
        self.started = 0
        self.asked: list[str] = []
        self.alone: list[str] = []
        self.flying: list[Request] = []

    def start(self) -> "FakeEngine":
        self.started += 1
        return self

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, requests: Iterator[Request | None], **_: Any) -> Iterator[Answer]:
        self.flying = []
        while True:
            while len(self.flying) < 8 and (request := next(requests, None)) is not None:
                self.flying.append(request)
                self.asked.append(request.key)
            if not self.flying:
                return
            if len(self.flying) == 1:
                self.alone.append(self.flying[0].key)
            yield self.answer(self.flying.pop(0))

    def answer(self, request: Request) -> Answer:
        states = true_states(request.prompt)
        chosen = int((states[-1, -1].float() @ HEAD.T).argmax())
        got = self.spoil(len(self.asked), request.key, states)
        if isinstance(got, str):
            return Failure(request.key, request.prompt, [], "error", None, got)
        path = self.folder / f"{request.key}.safetensors"
        tokens = torch.tensor(request.prompt)
        save_file({"hidden_states": got.contiguous(), "token_ids": tokens}, path)
        return Answer(request.key, request.prompt, [chosen], "length", path)


class Lane:
    """A lane of these samples, in shards of `size` samples."""

    def __init__(
        self, root: Path, samples: list[TokenizedSample], size: int = 12, folder: str = "staging"
    ):
        self.store = Store(root / "store", CONVENTION)
        self.samples = {s.id: s for s in samples}
        self.shards = [
            plan_shard("train", samples[i : i + size]) for i in range(0, len(samples), size)
        ]
        largest = max(s.tokens for s in self.shards)
        self.two_shards = 2 * largest * CONVENTION.bytes_per_token()
        self.folder = root / folder
        self.folder.mkdir(exist_ok=True)

    def look(self) -> LaneWork:
        return LaneWork(self.store, self.samples, self.shards)

    def run(
        self,
        spoil: Spoil = keep,
        floor: float = 0.9,
        limit: int = 1 << 30,
        progress: JobProgress | None = None,
    ) -> dict[str, Any]:
        """Extract with a new stand-in engine, `self.engine`; the lane's manifest.

        `floor`: smallest share of samples to keep. `limit`: most bytes to stage.
        """
        self.engine = FakeEngine(self.folder, spoil)
        work = self.look()
        with progress or JobProgress("test", len(self.samples), "samples") as shown:
            counts = extract(
                work,
                self.engine.start,
                FakeTeacher,
                shown,
                staging_bytes=limit,
                min_kept_share=floor,
            )
        return describe_lane(work, counts, floor).as_json()

    def read(self) -> dict[str, torch.Tensor]:
        """States of all samples in the store, by id."""
        found = {}
        for shard in self.shards:
            if self.store.has(shard.id):
                with Shard(self.store.path(shard.id)) as opened:
                    for number in range(len(opened.samples)):
                        sample = opened.read(number)
                        found[sample.id] = sample.states
        return found

    def bytes(self) -> dict[str, bytes]:
        """The store's files with their contents."""
        return {p.name: p.read_bytes() for p in self.store.folder.glob("*.*")}

    def states_are_right(self) -> bool:
        """Whether each sample in the store has its own states."""
        found = self.read()
        return all(torch.equal(found[i], true_states(self.samples[i].input_ids)) for i in found)


def refusing(*shards: ShardPlan) -> Spoil:
    """A `spoil` that lets every sample of these shards fail."""
    lost = {i for shard in shards for i in shard.samples}
    return lambda n, key, states: "no" if key.removesuffix("-again") in lost else states
