"""Dialogues and the store of answers, with a stand-in engine."""

import concurrent.futures
import json
import sys
import threading
import time

import numpy as np
import pytest

import generate_responses as program
from aerie.chat.template import ChatTemplate
from aerie.common import leases
from aerie.common.errors import InputError
from aerie.common.files import write_json_lines
from aerie.common.leases import lease_path
from aerie.engine.protocol import Answer
from aerie.generation import generate as generating
from aerie.generation import groups, record_files
from aerie.generation.answers import AnswerStore, Sampling
from aerie.generation.conversation import converse
from aerie.generation.generate import generate
from aerie.generation.manifest import ResponsesManifest, count_answers, load_answers
from aerie.samples.stored_answer import AnswerTokens, StoredAnswer
from support.models import make_fingerprint
from support.processes import Clock

SAMPLING = Sampling(temperature=0.0, top_p=1.0, max_tokens=8, max_length=200, seed=0)


class FakeEngine:
    """Answers every prompt with the same tokens; records what it was asked."""

    def __init__(self, template, text="a plan", finish="stop", fail_after=None):
        self.tokens = template.tokenizer(text, add_special_tokens=False)["input_ids"]
        if finish == "stop":
            self.tokens = [*self.tokens, template.tokenizer.eos_token_id]
        self.finish, self.fail_after, self.asked = finish, fail_after, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, requests, **_):
        while (request := next(requests, None)) is not None:
            self.asked.append(request)
            if self.fail_after is not None and len(self.asked) > self.fail_after:
                raise RuntimeError("engine died")
            yield Answer(request.key, request.prompt, self.tokens, self.finish, None)


@pytest.fixture(scope="module")
def template(tiny_verifier):
    return ChatTemplate.load(tiny_verifier)


def records(count, turns=1):
    return [
        {
            "id": f"{number:032x}",
            "source": "s",
            "messages": [
                {"role": "user", "content": f"count to {number}, {turn}"} for turn in range(turns)
            ],
        }
        for number in range(count)
    ]


def answer_all(engine, template, store, rows, known=None):
    known = {} if known is None else known
    generate(engine, {"train": rows}, template, SAMPLING, store, known, None, lambda *_: None)
    return known


def test_flipped_bit_is_never_read_as_another_answer(tmp_path):
    store = AnswerStore(tmp_path, "k")
    generator = np.random.default_rng(0)
    rows = [
        StoredAnswer(
            id=f"{n:032x}",
            samples=[AnswerTokens(ids=generator.integers(0, 50_000, 60).tolist())],
        )
        for n in range(8)
    ]
    for row in rows:
        store.add(row)
    store.flush()
    (path,) = store.folder.iterdir()
    data, whole = path.read_bytes(), {row.id: row for row in rows}
    for place in range(0, len(data), 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        found = AnswerStore(tmp_path, "k").load()
        # Nothing of a damaged file is used, not even what comes before the damage.
        assert found in ({}, whole), place
        path.unlink(missing_ok=True)


def test_damaged_file_that_another_run_moved_aside_is_ignored(tmp_path, monkeypatch):
    store = AnswerStore(tmp_path, "k")
    store.add(StoredAnswer(id="0", dropped="x"))
    store.flush()

    def read(path):
        path.unlink()
        raise InputError("damaged")

    monkeypatch.setattr(record_files, "read_json_lines", read)
    assert AnswerStore(tmp_path, "k").load() == {}


def test_answered_records_are_not_asked_again(tmp_path, template):
    store = AnswerStore(tmp_path, "k")
    answer_all(FakeEngine(template), template, store, records(5))
    again = AnswerStore(tmp_path, "k")
    known = again.load()
    assert len(known) == 5
    engine = FakeEngine(template)
    answer_all(engine, template, again, records(7), known)
    assert len(engine.asked) == 2
    assert len(AnswerStore(tmp_path, "k").load()) == 7


def test_answers_before_an_engine_crash_are_kept(tmp_path, template):
    store = AnswerStore(tmp_path, "k")
    with pytest.raises(RuntimeError):
        answer_all(FakeEngine(template, fail_after=50), template, store, records(80))
    assert len(AnswerStore(tmp_path, "k").load()) == 50


def test_damaged_file_is_moved_aside(tmp_path, template):
    store = AnswerStore(tmp_path, "k")
    answer_all(FakeEngine(template), template, store, records(3))
    (path,) = store.folder.glob("*.zst")
    path.write_bytes(path.read_bytes()[:-5])
    assert AnswerStore(tmp_path, "k").load() == {}
    assert list(store.folder.glob("*.damaged"))


def test_each_turn_sees_the_answers_before_it(template):
    engine = FakeEngine(template)
    ((dialogue, _),) = converse(engine, records(1, turns=3), template, SAMPLING)
    answer = dialogue.stored()
    assert answer.finishes == ["stop"] * 3
    (sample,) = answer.samples
    assert len(sample.spans) == 3
    # The second prompt begins with the first and its answer, token for token.
    first, second, third = (r.prompt for r in engine.asked)
    assert second[: len(first) + len(engine.tokens)] == first + engine.tokens
    assert third[: len(second) + len(engine.tokens)] == second + engine.tokens
    for start, end in sample.spans:
        assert sample.ids[start:end] == engine.tokens


def test_prompt_that_fills_the_window_is_dropped_unasked(template):
    long = records(1)
    long[0]["messages"][0]["content"] = "apples " * 300
    engine = FakeEngine(template)
    found = list(converse(engine, long, template, SAMPLING))
    assert engine.asked == []
    assert found[0][0].stored().dropped == "prompt fills the window"


def test_truncated_answers_are_kept_and_counted(tmp_path, template):
    known = answer_all(
        FakeEngine(template, finish="length"), template, AnswerStore(tmp_path, "k"), records(4)
    )
    counts = count_answers(known.values())
    assert (counts.answers, counts.truncated) == (4, 4)


def test_only_relevant_settings_change_the_key():
    greedy = Sampling(0.0, 1.0, 8, 200, seed=1).key("f")
    assert greedy == Sampling(0.0, 0.5, 8, 200, seed=2).key("f")
    sampled = {Sampling(0.7, 1.0, 8, 200, seed).key("f") for seed in (1, 2)}
    assert len(sampled) == 2
    assert greedy != Sampling(0.0, 1.0, 8, 200, seed=1).key("another verifier")


# Two runs on one store


class SlowEngine(FakeEngine):
    """Answers slowly, eight requests at a time; waits with the first answer until the other run
    has an engine, too."""

    def __init__(self, template, both):
        super().__init__(template)
        self.both = both

    def run(self, requests, **_):
        flying = []
        while True:
            while len(flying) < 8 and (request := next(requests, None)) is not None:
                flying.append(request)
                self.asked.append(request)
            if not flying:
                return
            if self.both is not None:
                self.both.wait(timeout=120)
                self.both = None
            time.sleep(0.01)
            request = flying.pop(0)
            yield Answer(request.key, request.prompt, self.tokens, self.finish, None)


def test_two_runs_with_the_same_prompts_share_the_work(tmp_path, template, monkeypatch):
    monkeypatch.setattr(generating, "GROUP", 8)
    monkeypatch.setattr(groups, "POLL_SECONDS", 0.02)
    rows, both, waited = records(100), threading.Barrier(2), []

    def run():
        engine = SlowEngine(template, both)
        known = {}
        adopted = generate(
            engine,
            {"train": rows},
            template,
            SAMPLING,
            AnswerStore(tmp_path, "k"),
            known,
            None,
            lambda *_: None,
            waited.append,
        )
        return adopted, len(engine.asked), known

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, two = (x.result() for x in [pool.submit(run) for _ in range(2)])
    assert one[1] + two[1] == 100
    assert (one[0], two[0]) == (two[1], one[1])
    assert min(one[1], two[1]) > 0
    assert one[2].keys() == two[2].keys() == {r["id"] for r in rows}
    assert len(AnswerStore(tmp_path, "k").load()) == 100
    assert not list(tmp_path.rglob("*.lease"))


def test_waiting_run_answers_the_records_of_a_killed_one(tmp_path, template, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    monkeypatch.setattr(groups, "POLL_SECONDS", 0)
    rows, waited = records(3), []

    def idle(words):
        waited.append(words)
        clock.sleep(leases.EXPIRY_SECONDS / 3)

    store = AnswerStore(tmp_path, "k")
    lease = lease_path(store.folder / groups.digest([r["id"] for r in rows]))
    lease.parent.mkdir(parents=True)
    lease.write_text('{"machine": "node7", "process": 5, "token": "x"}')
    engine = FakeEngine(template)
    generate(engine, {"train": rows}, template, SAMPLING, store, {}, None, lambda *_: None, idle)
    assert len(engine.asked) == 3
    assert set(waited) == {"waiting for process 5 on node7, which is answering 1 groups of records"}


# The program


def test_program_answers_what_is_missing(tmp_path, tiny_verifier, template, monkeypatch):
    splits = {"train": records(6), "heldout": records(9)[6:]}
    for name, rows in splits.items():
        write_json_lines(tmp_path / f"{name}.jsonl.zst", rows)
    fingerprint = make_fingerprint(path=str(tiny_verifier), hidden_size=128)
    fingerprint.write(tmp_path / "verifier")
    settings = {
        "generation": {"max_tokens": 8},
        "samples": {"max_length": 200},
        "hidden_states": {"samples_per_shard": 2},
        "engine": {},
        "verifier": {},
    }
    given = {
        "train": tmp_path / "train.jsonl.zst",
        "heldout": tmp_path / "heldout.jsonl.zst",
        "verifier": tmp_path / "verifier",
        "store": tmp_path / "store",
        "settings": json.dumps(settings),
        "output": tmp_path / "manifest.json",
    }
    engine, options = FakeEngine(template), {}
    monkeypatch.setattr(
        generating, "InProcessEngine", lambda *_, **more: options.update(more) or engine
    )
    monkeypatch.setattr(sys, "argv", ["x", *(f"--{k}={v}" for k, v in given.items())])
    program.main()
    made = ResponsesManifest.read(given["output"])
    assert (made.records, made.generated, made.reused, made.sampling) == (9, 9, 0, SAMPLING)
    assert made.captured.shards == 0  # this engine saves no states
    assert options["capture_ids"] == [2, 15, 27, 30] and options["max_model_len"] == 200
    assert not options["staging"].exists()
    assert len(load_answers(given["output"], given["store"], splits)) == 9
    program.main()
    again = ResponsesManifest.read(given["output"])
    assert (again.key, again.generated, again.reused) == (made.key, 0, 9)
    assert len(engine.asked) == 9
