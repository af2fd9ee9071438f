"""Hidden states saved while answers are generated, with a stand-in engine."""

import contextlib
import time

import pytest
import torch
from safetensors.torch import save_file

from aerie.config import HiddenStates, Samples
from aerie.engine.protocol import Answer
from aerie.generation import capture as capturing
from aerie.generation.answers import AnswerStore, Sampling
from aerie.generation.capture import Capture
from aerie.generation.generate import generate
from aerie.states.ids import sample_key
from aerie.states.shard import Shard
from aerie.states.store import Store
from support.lanes import CONVENTION, HEAD, IDS, VOCABULARY, WIDTH, FakeTeacher, nearly

SAMPLING = Sampling(temperature=0.0, top_p=1.0, max_tokens=12, max_length=40, seed=0)
SAMPLES = Samples(max_length=40, min_supervised_tokens=1)
ANSWER = 10


class FakeTemplate:
    def prompt_ids(self, messages, tools):
        return [ord(c) % VOCABULARY for c in messages[0]["content"]]

    def decode(self, tokens):
        return ""


def state(tokens: list[int]) -> torch.Tensor:
    """The states of the last of these tokens."""
    generator = torch.Generator().manual_seed(int(sample_key(tokens)[:8], 16))
    return torch.randn(len(IDS), WIDTH, generator=generator).to(torch.bfloat16)


class FakeEngine:
    """Answers with the tokens that the states predict, eight requests at a time."""

    def __init__(self, folder, spoil=lambda record, states: states):
        self.folder, self.spoil = folder, spoil
        self.most = 0

    def run(self, requests, **_):
        flying = []
        while True:
            while len(flying) < 8 and (request := next(requests, None)) is not None:
                flying.append(request)
            if not flying:
                return
            request = flying.pop(0)
            tokens, states = list(request.prompt), []
            for position in range(len(tokens)):
                states.append(state(tokens[: position + 1]))
            while len(tokens) < len(request.prompt) + ANSWER:
                tokens.append(int((states[-1][-1].float() @ HEAD.T).argmax()))
                states.append(state(tokens))
            path = self.folder / f"{request.key.replace(':', '-')}.safetensors"
            states = self.spoil(request.key.split(":")[0], torch.stack(states[:-1]))
            save_file({"hidden_states": states, "token_ids": torch.tensor(tokens[:-1])}, path)
            yield Answer(request.key, request.prompt, tokens[-ANSWER:], "stop", path)
            staged = 0
            for path in self.folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # the writer has just removed it
                    staged += path.stat().st_size
            self.most = max(self.most, staged)


@pytest.fixture
def run(tmp_path):
    """Answers 60 records while at most `limit` bytes are staged; returns engine and capture."""
    records = [
        {"id": f"{n:032x}", "source": "s", "messages": [{"role": "user", "content": f"ask {n:04}"}]}
        for n in range(60)
    ]

    def answer(limit, spoil=lambda record, states: states):
        staging = tmp_path / "staging"
        staging.mkdir()
        engine = FakeEngine(staging, spoil)
        capture = Capture(
            Store(tmp_path / "store", CONVENTION),
            FakeTeacher(),
            {"train": records},
            SAMPLES,
            HiddenStates(samples_per_shard=6),
            greedy=True,
            staging_bytes=limit,
        )
        answers = AnswerStore(tmp_path / "store", "k")
        known = {}
        generate(
            engine, {"train": records}, FakeTemplate(), SAMPLING, answers, known, capture,
            lambda *_: None,
        )  # fmt: skip
        assert len(known) == 60
        assert list(staging.iterdir()) == []
        return engine, capture

    return answer


SIZE = 17 * CONVENTION.bytes_per_token() + 17 * 8 + 200
"""About the bytes of a sample's states in staging."""


def test_all_states_become_shards(run):
    _, capture = run(1 << 30)
    assert capture.shards == len(capture.groups)
    assert capture.tokens == 60 * 17
    assert capture.failed == []
    for path in capture.store.folder.glob("*.safetensors"):
        with Shard(path) as shard:
            for number in range(len(shard.samples)):
                sample = shard.read(number)
                right = [state(sample.tokens[: t + 1].tolist()) for t in range(17)]
                assert torch.equal(sample.states, torch.stack(right))


def test_staging_stays_within_its_limit_when_writing_is_slow(run, monkeypatch):
    write_shard = capturing.write_shard

    def slowly(*arguments):
        time.sleep(0.05)
        write_shard(*arguments)

    monkeypatch.setattr(capturing, "write_shard", slowly)
    engine, capture = run(30 * SIZE)
    assert engine.most <= 30 * SIZE
    assert capture.shards == len(capture.groups)


def test_group_that_does_not_fit_into_staging_is_left_to_extraction(run):
    engine, capture = run(4 * SIZE)
    assert engine.most <= 4 * SIZE
    assert sum(capture.left) > 0
    assert capture.shards == len(capture.groups) - sum(capture.left)


@pytest.mark.parametrize(
    "fault",
    [
        torch.zeros_like,
        lambda s: torch.full_like(s, 0.5),
        lambda s: s * float("nan"),
        lambda s: s.fill_(float("inf")),
        lambda s: s[:-1].contiguous(),
        lambda s: s.roll(1, 0),
        lambda s: s.roll(1, 1),
        lambda s: torch.randn(s.shape).to(torch.bfloat16),
    ],
    ids=["zeros", "constant", "nan", "infinity", "short", "shifted", "layers", "another's"],
)
def test_shard_with_wrong_states_is_left_to_extraction(run, fault):
    wrong = f"{31:032x}"
    _, capture = run(1 << 30, lambda record, s: fault(s) if record == wrong else s)
    assert capture.shards == len(capture.groups) - 1
    assert len(capture.failed) == 1
    for path in capture.store.folder.glob("*.safetensors"):
        with Shard(path) as shard:
            assert wrong not in [s["id"] for s in shard.samples]


def test_states_that_are_mostly_right_are_found_in_small_groups(run):
    """Like those of the layer before: every other position predicts the second best token."""

    def near(record, states):
        for t in range(0, len(states), 2):
            states[t, -1] = nearly(states[t, -1])
        return states

    _, capture = run(1 << 30, near)
    judged = sum(len(records) * capturing.TEACHER_TOKENS >= 32 for _, records in capture.groups)
    assert len(capture.failed) == judged == len(capture.groups) - capture.shards
    assert judged > 0
