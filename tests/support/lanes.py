"""A lane with a stand-in for the engine and the teacher, so that each fault can be forced."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from aerie.engine.in_process import Answer, Failure
from aerie.extraction.lane import LaneWork, describe_lane, fill
from aerie.samples.file import TokenizedSample
from aerie.samples.shards import plan_shard
from aerie.states.shard import Convention, Shard, Store, sample_key

IDS, WIDTH, VOCABULARY = (1, 2, 4), 16, 64
CONVENTION = Convention("f" * 32, IDS, WIDTH)
HEAD = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9))


def rows(count: int, start: int = 0) -> list[TokenizedSample]:
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


class FakeTeacher:
    """An output head without a norm; its token for a state is the best one."""

    head = HEAD

    def ranks(self, last, tokens):
        logits = last.float() @ HEAD.T
        return (logits > logits.gather(1, tokens[:, None])).sum(1)


class FakeEngine:
    """Gives `true_states`, or what `spoil(answer number, key, states)` makes of them.

    `spoil` may return a text (a failure), states, or raise.
    """

    max_model_len = 100

    def __init__(self, folder: Path, spoil=lambda n, key, states: states):
        self.folder, self.spoil = folder, spoil
        self.started = 0
        self.asked: list[str] = []
        self.alone: list[str] = []

    def start(self):
        self.started += 1
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, requests):
        flying = self.flying = []
        while True:
            while len(flying) < 8 and (request := next(requests, None)) is not None:
                flying.append(request)
                self.asked.append(request.key)
            if not flying:
                return
            if len(flying) == 1:
                self.alone.append(flying[0].key)
            request = flying.pop(0)
            states = true_states(request.prompt)
            chosen = int((states[-1, -1].float() @ HEAD.T).argmax())
            got = self.spoil(len(self.asked), request.key, states)
            if isinstance(got, str):
                yield Failure(request.key, request.prompt, [], "error", None, got)
                continue
            path = self.folder / f"{request.key}.safetensors"
            tokens = torch.tensor(request.prompt)
            save_file({"hidden_states": got.contiguous(), "token_ids": tokens}, path)
            yield Answer(request.key, request.prompt, [chosen], "length", path)


class Lane:
    def __init__(
        self, root: Path, samples: list[TokenizedSample], size: int = 12, folder: str = "staging"
    ):
        self.store = Store(root / "store", CONVENTION)
        self.rows = {r.id: r for r in samples}
        self.shards = [
            plan_shard("train", samples[i : i + size]).as_json()
            for i in range(0, len(samples), size)
        ]
        largest = max(s["tokens"] for s in self.shards)
        self.two_shards = 2 * largest * CONVENTION.bytes_per_token()
        self.folder = root / folder
        self.folder.mkdir(exist_ok=True)

    def run(self, spoil=lambda n, key, states: states, floor=0.9, limit=1 << 30, **more):
        self.engine = FakeEngine(self.folder, spoil)
        work = LaneWork(self.store, self.rows, self.shards)
        counts = fill(
            work,
            self.engine.start,
            FakeTeacher,
            lambda *_: None,
            staging_bytes=limit,
            min_kept_share=floor,
            **more,
        )
        return describe_lane(work, counts, floor)

    def read(self) -> dict[str, torch.Tensor]:
        found = {}
        for shard in self.shards:
            if self.store.has(shard["id"]):
                with Shard(self.store.path(shard["id"])) as opened:
                    for number in range(len(opened.samples)):
                        sample = opened.read(number)
                        found[sample.id] = sample.states
        return found

    def bytes(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in self.store.folder.glob("*.*")}


def right(lane: Lane) -> bool:
    found = lane.read()
    return all(torch.equal(found[i], true_states(lane.rows[i].input_ids)) for i in found)
