"""Endpoints in place of the engine, against small servers in threads of the test."""

import http.server
import json
import socket
import threading
import time

import pytest

from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.config import load_config
from aerie.engine.client import first_model
from aerie.engine.endpoints import Endpoints
from aerie.engine.protocol import Refused, Request
from aerie.engine.servers import EndpointError, Patience, Server
from aerie.generation.answers import AnswerStore, Sampling
from aerie.generation.conversation import converse
from aerie.generation.generate import generate
from aerie.generation.manifest import count_answers
from aerie.samples.stored_answer import StoredAnswer
from support.models import make_tokenizer
from support.processes import wait_until

HASTE = Patience(first=0.01, most=0.04, tries=4, connect=60.0, answer=120.0)
GREEDY = Sampling(0.0, 1.0, max_tokens=24, max_length=200, seed=0, model="tiny")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return ChatTemplate.load(folder)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("AERIE_API_KEY", raising=False)


class FakeServer:
    """A completions server that answers with the ids of " a reason" and the end of the turn.

    `ids_in`, `ids_out`: whether it takes and gives token ids. `faults`: statuses (0: the
    connection is cut) of the next completions, before it works. `change(payload, body)` edits
    an answer.
    """

    def __init__(self, template, model="tiny", ids_in=True, ids_out=True, **options):
        self.template, self.ids_in, self.ids_out = template, ids_in, ids_out
        self.model = {"id": model, **options.pop("card", {})}
        self.faults = list(options.pop("faults", []))
        self.change = options.pop("change", lambda payload, body: None)
        self.key = options.pop("key", None)
        self.bodies, self.lock = [], threading.Lock()
        self.flying = self.most = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.reply(200, {"data": [outer.model]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.key and self.headers.get("Authorization") != f"Bearer {outer.key}":
                    return self.reply(401, {"error": {"message": "who are you?"}})
                with outer.lock:
                    outer.flying += 1
                    outer.most = max(outer.most, outer.flying)
                try:
                    answer = outer.complete(body)
                finally:
                    # Before the answer is sent: the next request may come at once.
                    with outer.lock:
                        outer.flying -= 1
                return self.reply(*answer)

            def reply(self, status, payload):
                if status == 0:
                    self.close_connection = True
                    return self.connection.close()
                data = json.dumps(payload).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)

    def complete(self, body):
        with self.lock:
            self.bodies.append(body)
            if self.faults:
                return self.faults.pop(0), {"error": {"message": "out of luck"}}
        if not self.ids_in and isinstance(body["prompt"], list):
            return 400, {"message": "prompt: expected a string"}
        tokenizer = self.template.tokenizer
        text = body["prompt"]
        prompt = tokenizer(text)["input_ids"] if isinstance(text, str) else text
        tokens = [*tokenizer(" a reason")["input_ids"], 2][: body["max_tokens"]]
        finish = "stop" if tokens[-1] == 2 else "length"
        choice = {"text": self.template.decode(tokens), "finish_reason": finish}
        if self.ids_out and body.get("return_token_ids"):
            choice |= {"token_ids": tokens, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        payload = {"choices": [choice], "usage": usage}
        self.change(payload, body)
        return 200, payload

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


DEAD = socket.socket()
DEAD.bind(("127.0.0.1", 0))


def dead_url():
    """An address at which nothing listens, now and later: its port is taken."""
    return f"http://127.0.0.1:{DEAD.getsockname()[1]}/v1"


def open_endpoints(template, *urls, concurrency=4, max_model_len=200):
    return Endpoints(
        list(urls),
        "tiny",
        template,
        concurrency=concurrency,
        max_model_len=max_model_len,
        patience=HASTE,
    )


def asked(template, number=1, max_tokens=24):
    return [
        Request(
            f"r{i}:0", template.prompt_ids([{"role": "user", "content": f"why {i}"}]), max_tokens
        )
        for i in range(number)
    ]


def run(endpoints, requests, **options):
    return list(endpoints.run(iter(requests), **options))


def record(name, *turns):
    return {"id": name, "messages": [{"role": "user", "content": t} for t in turns]}


def expected(template):
    return [*template.tokenizer(" a reason")["input_ids"], 2]


@pytest.mark.parametrize("ids_in", [True, False], ids=["ids in", "text in"])
@pytest.mark.parametrize("ids_out", [True, False], ids=["ids out", "text out"])
def test_every_kind_of_server_gives_the_same_tokens(template, ids_in, ids_out):
    with (
        FakeServer(template, ids_in=ids_in, ids_out=ids_out) as server,
        open_endpoints(template, server.url) as endpoints,
    ):
        requests = asked(template, 6)
        answers = run(endpoints, requests)
    assert sorted(a.key for a in answers) == sorted(r.key for r in requests)
    assert {tuple(a.tokens) for a in answers} == {tuple(expected(template))}
    assert {a.finish for a in answers} == {"stop"}
    prompts = {r.key: r.prompt for r in requests}
    assert all(a.prompt == prompts[a.key] and a.states is None for a in answers)
    assert server.most <= 4
    # Only the first requests in flight find out what the server does not accept.
    of_ids = sum(isinstance(b["prompt"], list) for b in server.bodies)
    assert of_ids == 6 if ids_in else of_ids <= 4


def test_requests_contain_the_sampling_settings_and_token_ids(template):
    with FakeServer(template) as server, open_endpoints(template, server.url) as endpoints:
        request = asked(template)[0]
        run(endpoints, [request], temperature=0.5, top_p=0.9, seed=lambda key: len(key))
        run(endpoints, [request], seed=lambda key: 1)
    sampled, greedy = server.bodies
    assert sampled["prompt"] == request.prompt
    assert (sampled["temperature"], sampled["top_p"], sampled["seed"]) == (0.5, 0.9, 4)
    assert (sampled["model"], sampled["max_tokens"]) == ("tiny", 24)
    assert sampled["return_token_ids"] is True and sampled["top_k"] == -1
    assert greedy["temperature"] == 0 and "seed" not in greedy


def test_a_server_that_knows_only_openais_fields(template):
    server = FakeServer(template, ids_in=False)
    plain = server.complete
    server.complete = lambda body: (400, {}) if "top_k" in body else plain(body)
    with server, open_endpoints(template, server.url) as endpoints:
        answers = run(endpoints, asked(template, 2))
    assert [a.tokens for a in answers] == [expected(template)] * 2


def test_a_cut_answer_has_no_end_of_turn(template):
    with (
        FakeServer(template, ids_out=False) as server,
        open_endpoints(template, server.url) as endpoints,
    ):
        (answer,) = run(endpoints, asked(template, max_tokens=2))
    assert answer.finish == "length"
    assert answer.tokens == expected(template)[:2]


def edit(**choice):
    def change(payload, body):
        payload["choices"][0].update(choice)

    return change


def count(**usage):
    def change(payload, body):
        payload["usage"].update(usage)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (count(completion_tokens=40), "another number of tokens"),
        (edit(text="a \ufffd"), "bytes that are not text"),
        (edit(finish_reason="content_filter"), "content_filter"),
        (edit(prompt_token_ids=[1, 2]), "read the prompt as other tokens"),
    ],
)
def test_an_answer_whose_tokens_are_not_certain_is_refused(template, change, reason):
    with (
        FakeServer(template, ids_out=False, change=change) as server,
        open_endpoints(template, server.url) as endpoints,
    ):
        (answer,) = run(endpoints, asked(template))
        assert isinstance(answer, Refused) and reason in answer.reason
        ((conversation, _),) = converse(endpoints, [record("a", "why")], template, GREEDY)
    stored = conversation.stored()
    assert stored.as_json() == {"id": "a", "dropped": answer.reason}
    assert count_answers([stored]).not_answered == 1


def test_an_answer_that_tokenises_differently_is_refused(template, monkeypatch):
    with (
        FakeServer(template, ids_out=False) as server,
        open_endpoints(template, server.url) as endpoints,
    ):
        encode = endpoints.codec.encode
        monkeypatch.setattr(endpoints.codec, "encode", lambda text: encode(text)[:-1])
        (answer,) = run(endpoints, asked(template))
    assert isinstance(answer, Refused) and "re-tokenised" in answer.reason


def test_a_prompt_with_text_like_a_control_token_is_not_sent_as_text(template):
    prompt = template.prompt_ids([{"role": "user", "content": "say <|im_end|>"}])
    with (
        FakeServer(template, ids_in=False) as server,
        open_endpoints(template, server.url) as endpoints,
    ):
        answers = run(endpoints, [*asked(template), Request("odd:0", prompt, 8)], concurrency=1)
    assert isinstance(answers[1], Refused)
    assert answers[1].reason == "prompt cannot be given to the endpoint as text"


@pytest.mark.parametrize("faults", [[500], [429, 503], [0], [500, 0, 429]])
def test_a_failed_request_is_asked_again(template, faults):
    with (
        FakeServer(template, faults=faults) as server,
        open_endpoints(template, server.url, concurrency=1) as endpoints,
    ):
        answers = run(endpoints, asked(template, 3))
    assert [a.tokens for a in answers] == [expected(template)] * 3
    assert not server.faults
    assert len(server.bodies) >= 3 + len(faults)


def empty_once(**choice):
    """Breaks the first answer."""
    left = [edit(**choice)]

    def change(payload, body):
        if left:
            left.pop()(payload, body)
            payload["usage"] = {}

    return change


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": []},
        {"token_ids": None, "text": ""},
        {"token_ids": None, "text": None},
        {"finish_reason": None},
        {"finish_reason": "abort"},
    ],
)
def test_an_empty_or_broken_answer_is_asked_again(template, choice):
    with (
        FakeServer(template, change=empty_once(**choice)) as server,
        open_endpoints(template, server.url) as endpoints,
    ):
        (answer,) = run(endpoints, asked(template))
    assert answer.tokens == expected(template)
    assert sum(b["max_tokens"] > 1 for b in server.bodies) == 2


def test_one_request_that_always_fails_does_not_stop_the_others(template):
    server = FakeServer(template)
    works = server.complete
    poison = asked(template)[0].prompt
    server.complete = lambda body: (500, {}) if body["prompt"] == poison else works(body)
    with server, open_endpoints(template, server.url, concurrency=2) as endpoints:
        answers = {a.key: a for a in run(endpoints, asked(template, 12))}
    assert len(answers) == 12
    refused = [a for a in answers.values() if isinstance(a, Refused)]
    assert [a.key for a in refused] == ["r0:0"]
    assert refused[0].again


def test_the_next_run_asks_again_for_what_an_earlier_one_did_not_get(template, tmp_path):
    store = AnswerStore(tmp_path, GREEDY.key("f"))
    store.add(StoredAnswer(id="a", dropped="the endpoint fails on the request", again=True))
    store.flush()
    with FakeServer(template) as server, open_endpoints(template, server.url) as endpoints:
        splits = {"train": [record("a", "why")]}
        generate(endpoints, splits, template, GREEDY, store, {}, None, lambda *_: None)
    assert store.load()["a"].dropped is None


def test_a_request_that_is_too_long_is_refused_and_the_others_are_answered(template):
    server = FakeServer(template)
    works = server.complete
    server.complete = lambda b: (400, {}) if len(b["prompt"]) > 60 else works(b)
    long = template.prompt_ids([{"role": "user", "content": "why " * 60}])
    with server, open_endpoints(template, server.url) as endpoints:
        answers = run(endpoints, [*asked(template), Request("long:0", long, 8)], concurrency=1)
    assert answers[1].reason == "the endpoint refuses the request (HTTP 400)"


def test_a_live_endpoint_answers_everything_beside_a_dead_one(template, capsys):
    dead = dead_url()
    with FakeServer(template) as server, open_endpoints(template, dead, server.url) as endpoints:
        answers = run(endpoints, asked(template, 20))
    assert len({a.key for a in answers}) == 20
    assert all(a.tokens == expected(template) for a in answers)
    assert f"{dead} failed and is left out" in capsys.readouterr().err


def test_live_endpoints_share_the_work(template):
    def until_the_other_has_as_many(mine, another):
        def wait(payload, body):
            number = 1 + next(i for i, b in enumerate(servers[mine].bodies) if b is body)
            wait_until(
                lambda: len(servers[another].bodies) >= min(number, 4), "one has all the work", 100
            )

        return wait

    with (
        FakeServer(template, change=until_the_other_has_as_many(0, 1)) as one,
        FakeServer(template, change=until_the_other_has_as_many(1, 0)) as other,
        open_endpoints(template, one.url, other.url, concurrency=2) as endpoints,
    ):
        servers = one, other
        assert len(run(endpoints, asked(template, 16))) == 16
    assert min(len(one.bodies), len(other.bodies)) >= 4
    assert max(one.most, other.most) <= 2


def test_an_endpoint_that_comes_back_is_used_again(template, capsys):
    with (
        FakeServer(template, faults=[503] * 3) as server,
        open_endpoints(template, server.url, concurrency=1) as endpoints,
    ):
        assert len(run(endpoints, asked(template, 4))) == 4
    assert "answers again" in capsys.readouterr().err


def test_when_all_endpoints_are_dead_the_answers_so_far_are_kept(template, tmp_path):
    server = FakeServer(template)
    works = server.complete
    # Two answers, then nothing but errors.
    server.complete = lambda b: works(b) if len(server.bodies) < 2 else (500, {"message": "gone"})
    dead = dead_url()
    store = AnswerStore(tmp_path, GREEDY.key("f"))
    splits = {"train": [record(f"x{i}", f"why {i}") for i in range(5)]}
    with (
        server,
        open_endpoints(template, server.url, dead, concurrency=1) as endpoints,
        pytest.raises(EndpointError) as error,
    ):
        generate(endpoints, splits, template, GREEDY, store, {}, None, lambda *_: None)
    message = str(error.value)
    assert f"{server.url}: HTTP 500: gone" in message and dead in message
    assert error.value.faults.keys() == {server.url, dead}
    assert error.value.faults[server.url] == "HTTP 500: gone"
    assert "2 of 5 records" in message
    assert len(store.load()) == 2


def test_failures_of_one_outage_count_once():
    server = Server("http://x", 8, Patience(first=0.0, most=0.0))
    started = time.monotonic()
    for _ in range(8):
        server.fail("gone", started)
    assert server.failures == 1 and server.room == 1
    server.fail("gone", time.monotonic())
    assert server.failures == 2
    for _ in range(4):
        server.succeed()
    assert server.failures == 0 and server.room == 8


def test_all_turns_of_a_conversation_are_answered(template):
    with FakeServer(template) as server, open_endpoints(template, server.url) as endpoints:
        records = [record("a", "one", "two", "three"), record("b", "four")]
        found = [c.stored() for c, _ in converse(endpoints, records, template, GREEDY)]
    stored = {answer.id: answer for answer in found}
    assert stored["a"].texts == [" a reason"] * 3
    (sample,) = stored["a"].samples
    assert [sample.ids[s:e] for s, e in sample.spans] == [expected(template)] * 3
    assert len(stored["b"].texts) == 1


def test_a_refusal_in_a_later_turn_keeps_the_turns_before(template):
    def change(payload, body):
        if len(server.bodies) == 2:
            payload["choices"][0]["finish_reason"] = "content_filter"

    server = FakeServer(template, change=change)
    with server, open_endpoints(template, server.url) as endpoints:
        ((conversation, _),) = converse(endpoints, [record("a", "x", "y")], template, GREEDY)
    stored = conversation.stored()
    assert stored.texts == [" a reason"] and "content_filter" in stored.ended
    assert count_answers([stored]).ended_early == 1


def test_first_turn_only_answers_one_turn(template):
    only = Sampling(0.0, 1.0, 24, 200, 0, first_turn_only=True, model="tiny")
    with FakeServer(template) as server, open_endpoints(template, server.url) as endpoints:
        ((conversation, _),) = converse(endpoints, [record("a", "x", "y")], template, only)
    assert conversation.stored().texts == [" a reason"]
    assert len(server.bodies) == 1
    assert only.key("f") != GREEDY.key("f")


def test_answers_of_different_models_have_different_keys():
    engine = Sampling(0.0, 1.0, 24, 200, 0)
    assert len({engine.key("f"), GREEDY.key("f"), engine.key("g")}) == 3


def test_the_served_model_is_compared_with_the_configuration(template):
    with FakeServer(template, model="other") as server:
        assert first_model([dead_url(), server.url], HASTE) == "other"
        with pytest.raises(EndpointError, match=r"serves other, not tiny"):
            open_endpoints(template, server.url)
    with pytest.raises(EndpointError, match="ConnectError"):
        first_model([dead_url()], HASTE)
    with (
        FakeServer(template, card={"max_model_len": 64}) as server,
        pytest.raises(EndpointError, match=r"takes 64 tokens, samples.max_length is 200"),
    ):
        open_endpoints(template, server.url)


def test_the_key_comes_from_the_environment(template, monkeypatch):
    with FakeServer(template, key="secret") as server:
        with (
            open_endpoints(template, server.url) as endpoints,
            pytest.raises(EndpointError, match="AERIE_API_KEY"),
        ):
            run(endpoints, asked(template))
        monkeypatch.setenv("AERIE_API_KEY", "secret")
        with open_endpoints(template, server.url) as endpoints:
            assert run(endpoints, asked(template))[0].tokens == expected(template)


def test_an_abandoned_run_closes(template):
    with FakeServer(template, change=lambda *_: time.sleep(0.05)) as server:
        endpoints = open_endpoints(template, server.url)
        answers = endpoints.run(iter(asked(template, 8)))
        next(answers)
        endpoints.close()
        answers.close()


def test_the_configuration_checks_endpoint_urls():
    config = load_config({"generation": {"endpoints": ["http://host:8000/v1/"]}})
    assert config.generation.endpoints == ["http://host:8000/v1"]
    for wrong in ["host:8000", "http://me:secret@host/v1", "ftp://host/v1"]:
        with pytest.raises(InputError, match=r"generation\.endpoints"):
            load_config({"generation": {"endpoints": [wrong]}})
    with pytest.raises(InputError, match="twice"):
        load_config({"generation": {"endpoints": ["http://h/v1", "http://h/v1/"]}})
