"""Prompts that the verifier writes: sampling, filters, and how a killed job resumes."""

import contextlib
import json
import random
import sys

import pytest
from transformers import PreTrainedTokenizerFast

import write_prompts as program
from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.common.files import read_json_lines
from aerie.config import SelfPrompts, load_config
from aerie.corpus.conversations import conversations
from aerie.corpus.report import Tally
from aerie.engine.protocol import Answer
from aerie.generation import judging, self_prompts
from aerie.generation.judging import Judge, letter_share, repeated_share
from aerie.generation.self_prompts import (
    AttemptStore,
    attempt_seed,
    attempts_key,
    write_prompts,
)
from aerie.generation.self_prompts_report import SelfPromptsReport
from support import models
from support.models import make_fingerprint

START, END = 1, 2  # <|im_start|> and <|im_end|> of the tokenizer in support/models.py
THINGS = ["lake", "apple", "letter", "train", "boat", "road", "plan", "friend", "sun", "child"]
VERBS = ["count", "write", "rise", "reach", "watch", "find", "paint", "move", "carry"]


def tokenizer_of(folder):
    models.make_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate(tokenizer)


class FakeEngine:
    """Writes text that depends on the seed, answers in random order, and may die halfway."""

    def __init__(self, template, die_after=None, good=0.6):
        self.template, self.die_after, self.good = template, die_after, good
        self.asked, self.starts = [], 0

    @contextlib.contextmanager
    def start(self, turn):
        self.starts += 1
        yield self

    def ids(self, text):
        return self.template.tokenizer(text, add_special_tokens=False)["input_ids"]

    def write(self, seed):
        dice = random.Random(seed)
        things, verbs = dice.sample(THINGS, 4), dice.sample(VERBS, 2)
        good = f"{verbs[0]} the {things[0]} by the {things[1]}, {verbs[1]} a {things[2]} or not"
        bad = ["7 8 9 10 11 12 13 14", "on and on and on and on and on and on", "so", "so"]
        text = good if dice.random() < self.good else dice.choice(bad)
        return self.ids(text) + ([] if text.startswith("on") and dice.random() < 0.5 else [END])

    def run(self, requests, *, temperature, top_p, seed, concurrency=None):
        requests = list(requests)
        random.Random(len(self.asked)).shuffle(requests)
        for request in requests:
            if self.die_after is not None and len(self.asked) == self.die_after:
                raise KeyboardInterrupt
            self.asked.append(request.key)
            assert END in request.end_ids
            tokens = self.write(seed(request.key))[: request.max_tokens]
            yield Answer(request.key, request.prompt, tokens, "stop", None)


def written(template, store, engine=None, **settings):
    settings = SelfPrompts(**{"number": 20, **settings})
    engine = engine or FakeEngine(template)
    return write_prompts(engine.start, template, settings, store, lambda kept, asked: None)


@pytest.fixture
def store(tmp_path):
    return AttemptStore(tmp_path, "key")


# The header, cut from the chat template.

SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{{ messages[0].content }}"
OTHER_END = "<|im_start|>{{ messages[0].content | trim }}<|endoftext|>"


def changed(tokenizer, template):
    answer = "{% for m in messages[1:] %}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.chat_template = template + answer
    try:
        return ChatTemplate(tokenizer).user_turn()
    finally:
        tokenizer.chat_template = models.TEMPLATE


def test_the_header_ends_where_the_users_text_begins(template, tokenizer):
    turn = template.user_turn()
    assert tokenizer.decode(turn.header) == "<|im_start|>user\n"
    assert turn.end_ids == {END}


def test_templates_own_system_turn_is_part_of_the_header(tokenizer):
    turn = changed(tokenizer, SYSTEM + "<|im_end|>")
    assert tokenizer.decode(turn.header).endswith("Be brief.<|im_end|>\n<|im_start|>user\n")


def test_special_token_that_ends_the_user_turn_is_found(tokenizer):
    assert changed(tokenizer, OTHER_END).end_ids == {0, END}


def test_blank_that_belongs_to_the_first_word_is_left_to_the_verifier(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "WORDS", "a Hello to a Hello and a Hello")
    own = tokenizer_of(tmp_path)
    turn = changed(own, "<|im_start|>user: {{ messages[0].content }}<|im_end|>")
    assert own.decode(turn.header) == "<|im_start|>user:"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("USER: {{ messages[0].content }}\nBOT: ", "no token after the user's text"),
        ("{{ messages[0].content }}<|im_end|>", "no text before the user's"),
        ("<|im_start|>hi<|im_end|>", "does not show the user's text"),
    ],
)
def test_template_without_a_user_turn_is_refused(tokenizer, text, missing):
    with pytest.raises(InputError, match=missing):
        changed(tokenizer, text)


# The filters.


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("write a letter to a friend", ""),
        ("The answer is a plan: count the apples.", ""),
        ("so", "too short"),
        ("   \n ", "too short"),
        ("12 + 34 = 46, 7 * 8 = 56", "few letters"),
        ("солнце встаёт над тихим озером", "few letters"),
        ("write it again and write it again and write it again", "repetition"),
        ("apples and boats\n" * 4, "repetition"),
        ("write a letter to \ufffd friend", "broken characters"),
        ("write a letter to \x07 friend", "broken characters"),
        ("write a letter <|im_start|> to a friend", "control token"),
    ],
)
def test_attempt_is_dropped_for_the_right_reason(template, tokenizer, text, reason):
    judge = Judge(template, template.user_turn(), SelfPrompts().min_letter_share)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    verdict = judge.judge([*ids, END])
    assert (verdict.reason, verdict.tokens) == (reason, len(ids))
    assert judge.judge(ids).reason == "unfinished"
    assert judge.judge([*ids, END, *ids]) == verdict


def test_duplicates_of_earlier_attempts_are_dropped(template, tokenizer, monkeypatch):
    long = "every child on the quiet road has a plan to reach the lake and count the boats there"
    texts = ["write a letter", "Write  a letter", long, f"{long} too", "paint a boat or a train"]
    attempts = [[*tokenizer(t, add_special_tokens=False)["input_ids"], END] for t in texts]

    def reasons(attempts):
        judge = Judge(template, template.user_turn(), SelfPrompts().min_letter_share)
        return [verdict.reason for verdict in judge.judge_all(attempts)]

    assert reasons(attempts) == ["", "duplicate", "", "near duplicate", ""]
    for end in range(len(attempts)):
        assert reasons(attempts[:end]) == reasons(attempts)[:end]
    assert reasons([]) == []
    monkeypatch.setattr(judging, "NEAR_DUPLICATES", 1.01)
    assert reasons(attempts) == ["", "duplicate", "", "", ""]


def test_shares():
    assert letter_share("ab 12") == 0.5
    assert letter_share(" \n") == 0.0
    assert repeated_share("") == repeated_share("two words") == 0.0
    assert repeated_share("a b c a b c") == pytest.approx(1 / 4)
    assert repeated_share("one\ntwo\none\none") == 0.5


# Number, seeds, keeping.


def test_every_attempt_is_kept_or_counted(template, store):
    found = written(template, store)
    assert len(found.prompts) == 20
    assert len(found.verdicts) == len(found.prompts) + sum(found.dropped.values())
    assert found.asked >= len(found.verdicts)
    assert {"few letters", "too short"} <= set(found.dropped)
    assert all(1 <= len(shown) <= 3 for shown in found.examples.values())
    assert set(found.examples) == set(found.dropped)


def test_larger_number_keeps_the_prompts_of_a_smaller_one(template, store, tmp_path):
    small = written(template, store, number=10)
    engine = FakeEngine(template)
    large = written(template, store, engine, number=120)
    assert large.prompts[:10] == small.prompts
    assert len(engine.asked) == len(set(engine.asked)) and "0" not in engine.asked
    assert written(template, AttemptStore(tmp_path, "other"), number=120).prompts == large.prompts


def test_nothing_missing_starts_no_engine(template, store):
    first = written(template, store)
    engine = FakeEngine(template)
    again = written(template, store, engine)
    assert again.verdicts == first.verdicts
    assert (engine.starts, again.asked) == (0, 0)


def test_other_filters_use_the_same_attempts(template, store):
    written(template, store)
    engine = FakeEngine(template)
    assert written(template, store, engine, number=20, min_letter_share=0.0).prompts
    assert engine.starts == 0


@pytest.mark.parametrize("died_after", [0, 1, 40, 70])
def test_killed_job_resumes_with_the_same_result(template, tmp_path, died_after):
    whole = written(template, AttemptStore(tmp_path, "whole"), number=60)
    killed, engine = FakeEngine(template, died_after), FakeEngine(template)
    with pytest.raises(KeyboardInterrupt):
        written(template, AttemptStore(tmp_path, "a"), killed, number=60)
    after = written(template, AttemptStore(tmp_path, "a"), engine, number=60)
    assert after.verdicts == whole.verdicts
    assert len(killed.asked) == died_after and set(killed.asked).isdisjoint(engine.asked)


def test_too_few_prompts_fail_with_the_reasons(template, store, monkeypatch):
    monkeypatch.setattr(self_prompts, "MAX_ATTEMPTS", 2)
    with pytest.raises(InputError) as error:
        written(template, store, FakeEngine(template, good=0.0), number=30)
    assert "self_prompts.number is 30" in str(error.value)
    assert "in 60 attempts" in str(error.value)
    assert "few letters:" in str(error.value)


def test_key_depends_on_what_determines_an_attempt():
    def key(fingerprint="f", **settings):
        return attempts_key(SelfPrompts(**settings), fingerprint)

    for other in (key("g"), key(seed=1), key(top_p=0.5), key(temperature=0.5), key(max_tokens=9)):
        assert other != key()
    assert key(number=9, min_letter_share=0.1) == key()
    seeds = [attempt_seed(seed, attempt) for seed in range(3) for attempt in range(100)]
    assert len(set(seeds)) == 300 and all(0 <= seed < 2**32 for seed in seeds)


# Configuration and program.


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"corpus": {"sources": []}}, "corpus.sources: found []"),
        ({"self_prompts": {"number": 5}, "generation": {"mode": "keep"}}, "no answers to keep"),
        ({"self_prompts": {"max_tokens": 3}}, "self_prompts.max_tokens: found 3"),
        ({"self_prompts": {"min_tokens": 9}}, "min_tokens: no longer a key; it is fixed at 4"),
        ({"self_prompts": {"temperature": 0}}, "self_prompts.temperature: found 0"),
    ],
)
def test_wrong_setting_is_refused(values, expected):
    with pytest.raises(InputError) as error:
        load_config(values)
    assert expected in str(error.value)


def test_verifier_may_be_the_only_source():
    config = load_config({"corpus": {"sources": []}, "self_prompts": {"number": 5}})
    assert config.corpus.sources == [] and config.self_prompts.number == 5


def test_program_writes_a_source_of_the_corpus(tmp_path, template, monkeypatch):
    tokenizer_of(tmp_path / "verifier")
    fingerprint = tmp_path / "fingerprint.json"
    make_fingerprint(path=str(tmp_path / "verifier")).write(fingerprint)
    engine = FakeEngine(template)
    monkeypatch.setattr(self_prompts, "InProcessEngine", lambda *_, **__: engine.start(None))
    output, report = tmp_path / "self.jsonl.zst", tmp_path / "self.json"
    values = {"--verifier": fingerprint, "--store": tmp_path / "store"}
    settings = {"self_prompts": {"number": 12}, "engine": {}, "verifier": {}}
    values |= {"--settings": json.dumps(settings), "--output": output, "--report": report}
    arguments = [str(part) for pair in values.items() for part in pair]
    monkeypatch.setattr(sys, "argv", ["write_prompts.py", *arguments])
    program.main()
    found = SelfPromptsReport.read(report)
    assert found.kept == 12 and found.settings["number"] == 12
    assert found.attempted == found.kept + sum(found.dropped.values())
    assert set(found.examples) == set(found.dropped)
    assert [*(tmp_path / "store" / "self_prompts" / found.key).glob("*.jsonl.zst")]
    prompts = [row["prompt"] for row in read_json_lines(output)]
    config = load_config({"corpus": {"sources": [str(output)]}}).corpus
    read = conversations(config.sources[0], "self", config, "generate", Tally(path=str(output)))
    assert [c.conversation["messages"][0]["content"] for c in read] == prompts
