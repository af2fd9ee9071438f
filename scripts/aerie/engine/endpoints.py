"""Servers that speak OpenAI's protocol, asked in place of the job's own engine.

`Endpoints.run` gives and takes what `Engine.run` does. Token ids go to `/completions` and come
back from it where the server can do that (vLLM, `return_token_ids`); where it cannot, the text
is tokenised again, in its context, and checked, and an answer that cannot be vouched for is
refused with a reason.
"""

import asyncio
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from aerie.chat.template import ChatTemplate, Unverified
from aerie.common.errors import EngineError, InputError
from aerie.engine.in_process import Answer, Failure, Request

API_KEY = "AERIE_API_KEY"
"""Name of the environment variable with the key for all endpoints; no other place holds one."""

IDS, TEXT, PLAIN = FORMS = range(3)
"""How a request is put: token ids; text; text with nothing but OpenAI's own fields."""

BEYOND_OPENAI = {
    "return_token_ids": True,
    "skip_special_tokens": False,
    # A server takes these from the checkpoint's generation_config.json unless they are said; the
    # engine does not.
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields of vLLM and SGLang."""

SAME_NUMBER = "re-tokenised answer has another number of tokens than were generated"


class EndpointError(EngineError):
    """No endpoint answers, or one is not what the configuration says."""


class Misfit(Exception):
    """An endpoint that waiting does not mend: another model, no permission, a wrong address."""


class Failed(Exception):
    """A request that is to be asked again. `wait`: seconds that the server asked for.

    `busy`: the server only has too much to do. `suspect`: it had just answered another request,
    so this one may be the cause.
    """

    def __init__(self, message: str, wait: float = 0.0, busy: bool = False):
        super().__init__(message)
        self.wait, self.busy, self.suspect = wait, busy, False


class TurnedDown(Exception):
    """A request that the server calls wrong; `status` is the HTTP status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass
class Refused(Failure):
    """A reason in words to count. `again`: another run may have better luck and asks again."""

    again: bool


@dataclass(frozen=True)
class Patience:
    """How long a server is waited for.

    The wait after a failure doubles from `first` to `most` seconds; after `tries` failures with
    nothing between an endpoint counts as dead (with the defaults after about two minutes).
    A request that fails `tries` times while others are answered is given up. `connect`, `probe`
    and `answer`: seconds for a connection, for a first word of a server, for a whole answer.
    """

    first: float = 1.0
    most: float = 60.0
    tries: int = 8
    connect: float = 10.0
    probe: float = 60.0
    answer: float = 3600.0

    def wait(self, failures: int) -> float:
        """Seconds after the given number of failures, with jitter: half of it to all."""
        return random.uniform(0.5, 1.0) * min(self.most, self.first * 2.0 ** (failures - 1))


class Server:
    """One endpoint and how it fares.

    `form`: how requests are put to it, None until one was accepted. `room`: requests at a time;
    after a failure a single one goes ahead, and every answer doubles the room again. `opened`:
    it was looked at (see `Endpoints._open`) and has not failed since. `given_up`: requests that
    it could not answer, since the last that it could.
    """

    def __init__(self, url: str, concurrency: int, patience: Patience):
        self.url, self.concurrency, self.patience = url, concurrency, patience
        self.form: int | None = None
        self.opened = self.unfit = False
        self.room, self.flying = concurrency, 0
        self.answers = self.failures = self.given_up = 0
        self.error = ""
        self.rests_until = self._failed_at = 0.0

    @property
    def dead(self) -> bool:
        return self.unfit or max(self.failures, self.given_up) >= self.patience.tries

    def free(self, now: float) -> bool:
        return not self.unfit and self.flying < self.room and now >= self.rests_until

    def succeed(self) -> None:
        if self.failures:
            print(f"{self.url} answers again", file=sys.stderr)
        self.failures = 0
        self.answers += 1
        self.given_up = 0
        self.room = min(self.concurrency, 2 * self.room)

    def fail(self, error: str, started: float, wait: float = 0.0) -> None:
        """A request begun at `started` (monotonic s) failed; those of one outage count once."""
        self.error = error
        if started < self._failed_at:
            return
        if not self.failures:
            print(f"{self.url} is left out for now: {error}", file=sys.stderr)
        self.failures += 1
        self.room = 1
        self.opened = False
        self._failed_at = time.monotonic()
        wait = max(self.patience.wait(self.failures), min(wait, self.patience.most))
        self.rests_until = self._failed_at + wait

    def dismiss(self, error: str) -> None:
        self.unfit, self.error = True, error
        print(f"{self.url} is left out: {error}", file=sys.stderr)


@dataclass
class Job:
    """A request on its way.

    `failures`: how often it failed while the server answered others. `seen`: answers that all
    servers had given when it last failed, None before.
    """

    request: Request
    failures: int = 0
    seen: int | None = None


def first_model(urls: list[str], patience: Patience | None = None) -> str:
    """Name of the first model of the first endpoint that answers.

    Raises `EndpointError` with every endpoint's fault when none does.
    """
    patience = patience or Patience()
    faults: dict[str, str] = {}
    for attempt in range(3):
        if attempt:
            time.sleep(patience.wait(attempt))
        for url in urls:
            try:
                found = httpx.get(f"{url}/models", headers=_headers(), timeout=patience.connect)
                _check(found)
                return _models(found)[0]["id"]
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                faults[url] = _words(error)
            except (Failed, Misfit, TurnedDown) as error:
                faults[url] = str(error)
            except IndexError:
                faults[url] = "it serves no model"
    raise EndpointError(
        "no endpoint tells which model it serves:\n  "
        + "\n  ".join(f"{url}: {fault}" for url, fault in faults.items())
        + "\nStart the servers or correct generation.endpoints; with "
        "generation.endpoint_model set, answers kept earlier are found without them"
    )


class Endpoints:
    """Several endpoints side by side, in the place of an `Engine`.

    `urls`: base URLs, such as `http://host:8000/v1`. `template`: the verifier's, whose tokenizer
    must be the servers'. `concurrency`: requests at a time, each endpoint. `max_model_len`:
    longest prompt with answer, tokens.

    Raises `EndpointError` when an endpoint that answers serves another model, takes less than
    `max_model_len` tokens or denies access. One that does not answer yet is tried again later.
    """

    def __init__(
        self,
        urls: list[str],
        model: str,
        template: ChatTemplate,
        *,
        concurrency: int,
        max_model_len: int,
        patience: Patience | None = None,
    ):
        self.model, self.template, self.max_model_len = model, template, max_model_len
        self.patience = patience or Patience()
        self.servers = [Server(url, concurrency, self.patience) for url in urls]
        self._turn_end = _end_of_turn(template)
        hello = template.prompt_ids([{"role": "user", "content": "Hello"}])
        self._greeting = Request("", hello, 1)
        self._eos_texts = {i: self._decode([i]) for i in sorted(template.eos_ids)}
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            headers=_headers(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(
                self.patience.answer, connect=self.patience.connect, write=60.0, pool=None
            ),
        )
        try:
            self._runner.run(self._open_all())
        except BaseException:
            self.close()
            raise

    def run(
        self,
        requests: Iterator[Request | None],
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: Callable[[str], int] | None = None,
        concurrency: int | None = None,
    ) -> Iterator[Answer]:
        """Answer requests in the order in which they finish, as `Engine.run` does.

        A failed request is asked again later, anywhere. One that cannot be answered gives a
        `Refused`. Raises `EndpointError` when requests are left and all endpoints are dead.
        """
        limit = concurrency or sum(s.concurrency for s in self.servers)
        again: deque[Job] = deque()
        flying: dict[asyncio.Task[Answer], tuple[Server, Job, float]] = {}

        def draw() -> Job | None:
            if again:
                return again.popleft()
            request = next(requests, None)
            return Job(request) if request is not None else None

        def body(request: Request) -> dict[str, Any]:
            common = {"model": self.model, "temperature": temperature, "top_p": top_p}
            if seed is not None and temperature > 0:
                common["seed"] = seed(request.key)
            return {**common, "max_tokens": request.max_tokens}

        try:
            while True:
                dead = all(s.dead for s in self.servers)
                while len(flying) < limit and not dead and (server := self._free()) is not None:
                    if (job := draw()) is None:
                        break
                    server.flying += 1
                    ask = self._ask(server, job.request, body(job.request))
                    task = self._runner.get_loop().create_task(ask)
                    flying[task] = server, job, time.monotonic()
                if not flying:
                    if (job := draw()) is None:
                        return
                    if dead:
                        raise EndpointError(self._obituary())
                    again.appendleft(job)
                for task in self._runner.run(self._wait(list(flying))):
                    answer = self._settle(task, *flying.pop(task), again)
                    if answer is not None:
                        yield answer
        finally:
            if not all(task.done() for task in flying):
                self._runner.run(_cancel(set(flying)))

    def close(self) -> None:
        """Give up what is in flight and close the connections."""
        self._runner.run(self._shut())
        self._runner.close()

    def __enter__(self) -> "Endpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _shut(self) -> None:
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})
        await self._client.aclose()

    # Which server, and what became of a request.

    def _free(self) -> Server | None:
        now = time.monotonic()
        free = [s for s in self.servers if s.free(now)]
        return min(free, key=lambda s: s.flying / s.room) if free else None

    async def _wait(self, flying: list[asyncio.Task[Answer]]) -> set[asyncio.Task[Answer]]:
        """Wait for a task to finish or a resting server to be due, whichever is first."""
        now = time.monotonic()
        due = [s.rests_until - now for s in self.servers if not s.unfit and s.rests_until > now]
        if not flying:
            await asyncio.sleep(min(due, default=0.0))
            return set()
        timeout = min(due, default=None)
        return (await asyncio.wait(flying, timeout=timeout, return_when="FIRST_COMPLETED"))[0]

    def _settle(
        self,
        task: asyncio.Task[Answer],
        server: Server,
        job: Job,
        started: float,
        again: deque[Job],
    ) -> Answer | None:
        """The answer of a finished task; None when its job was put into `again`."""
        server.flying -= 1
        request = job.request
        try:
            answer = task.result()
        except Misfit as error:
            server.dismiss(str(error))
        except TurnedDown as error:
            if server.form is not None:
                print(f"{server.url}, record {request.key}: {error}", file=sys.stderr)
                reason = f"the endpoint refuses the request (HTTP {error.status})"
                return _refuse(request, reason, again=True)
            server.fail(str(error), started)
        except Failed as error:
            given = sum(s.answers for s in self.servers)
            between = job.seen is not None and given > job.seen
            job.failures += not error.busy and (error.suspect or between)
            job.seen = given
            if error.suspect and not error.busy:
                server.failures = 0
            server.fail(str(error), started, error.wait)
            if job.failures >= self.patience.tries:
                server.given_up += 1
                print(f"{server.url}, record {request.key}: {error}", file=sys.stderr)
                return _refuse(request, "the endpoint fails on the request", again=True)
        else:
            server.succeed()
            return answer
        again.append(job)
        return None

    def _obituary(self) -> str:
        lines = [f"{s.url}: {s.error}" for s in self.servers]
        return "no endpoint works any more:\n  " + "\n  ".join(lines) + "\n"

    # One server.

    async def _open_all(self) -> None:
        started = time.monotonic()
        opened = await asyncio.gather(*map(self._open, self.servers), return_exceptions=True)
        for server, fault in zip(self.servers, opened, strict=True):
            if isinstance(fault, Misfit):
                raise EndpointError(f"{server.url}: {fault}")
            if isinstance(fault, Failed):
                server.fail(str(fault), started, fault.wait)
            elif fault is not None:
                raise fault

    async def _open(self, server: Server) -> None:
        try:
            await self._look_at(server)
        except TurnedDown as error:
            raise Failed(str(error)) from None
        server.opened = True

    async def _look_at(self, server: Server) -> None:
        """Compare the server with the configuration; a server without a list is believed.

        One that failed before has to give a token first: a request is not lost to a server that
        hangs, and one that fails nevertheless is known to be the cause.
        """
        url, timeout = f"{server.url}/models", self.patience.probe
        response = await self._send("GET", url, timeout=timeout)
        if response.status_code not in (404, 405, 501):
            _check(response)
            models = {m["id"]: m for m in _models(response)}
            if self.model not in models:
                raise Misfit(
                    f"it serves {', '.join(models) or 'nothing'}, not {self.model}; correct "
                    "generation.endpoints or generation.endpoint_model"
                )
            room = models[self.model].get("max_model_len")
            if isinstance(room, int) and room < self.max_model_len:
                raise Misfit(
                    f"it takes {room} tokens, samples.max_length is {self.max_model_len}; lower "
                    "that or start the server with a larger window"
                )
        if server.failures:
            body = {"model": self.model, "max_tokens": 1, "temperature": 0.0}
            await self._put(server, self._greeting, body, timeout=timeout)

    async def _ask(self, server: Server, request: Request, body: dict[str, Any]) -> Answer:
        """Ask one thing of a server, looking at the server first where that is due."""
        failed_before = server.failures > 0
        try:
            if not server.opened:
                await self._open(server)
            form, response = await self._put(server, request, body)
            return self._read(request, _json(response), form)
        except Unverified as error:
            return _refuse(request, error.reason)
        except Failed as error:
            error.suspect = failed_before and server.opened
            raise

    async def _put(
        self, server: Server, request: Request, body: dict[str, Any], **options: Any
    ) -> tuple[int, httpx.Response]:
        """Put a request in the first form that the server accepts (remembered).

        Raises `Unverified` when that form cannot hold it, `TurnedDown` when none is accepted.
        """
        turned_down = None
        for form in FORMS if server.form is None else (server.form,):
            prompt = request.prompt if form == IDS else self._as_text(request.prompt)
            extra = {} if form == PLAIN else {**BEYOND_OPENAI}
            if request.end_ids:
                extra["stop_token_ids"] = list(request.end_ids)
            full = {**body, **extra, "prompt": prompt}
            response = await self._send("POST", f"{server.url}/completions", json=full, **options)
            try:
                _check(response)
            except TurnedDown as error:
                turned_down = error
                continue
            server.form = form if server.form is None else min(form, server.form)
            return form, response
        assert turned_down is not None
        raise turned_down

    async def _send(self, method: str, url: str, **options: Any) -> httpx.Response:
        try:
            return await self._client.request(method, url, **options)
        except httpx.InvalidURL as error:
            raise Misfit(_words(error)) from None
        except httpx.HTTPError as error:
            raise Failed(_words(error)) from None

    # Tokens.

    def _read(self, request: Request, given: dict[str, Any], form: int) -> Answer:
        """The answer in a response. Raises `Failed` when there is none, `Unverified` when its
        tokens are not known."""
        try:
            choice, usage = given["choices"][0], given.get("usage") or {}
            finish, tokens = choice.get("finish_reason"), choice.get("token_ids")
            seen = choice.get("prompt_token_ids") or given.get("prompt_token_ids")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Failed("the response holds no answer") from None
        if finish in (None, "abort", "error"):
            raise Failed(f"the answer was broken off (finish reason {finish})")
        if finish not in ("stop", "length"):
            raise Unverified(f"the endpoint ended the answer: {finish}")
        size = usage.get("prompt_tokens") if form != IDS else None
        if seen not in (None, request.prompt) or size not in (None, 0, len(request.prompt)):
            raise Unverified("the endpoint read the prompt as other tokens")
        if tokens is None:
            tokens = self._tokenise(request, choice, usage.get("completion_tokens") or None)
        elif not tokens or not all(isinstance(i, int) for i in tokens):
            raise Failed("the response holds an empty answer")
        elif finish == "stop" and tokens[-1] not in {*self._eos_texts, choice.get("stop_reason")}:
            tokens = [*tokens, self._ended_by(choice)]
        return Answer(request.key, request.prompt, list(tokens), finish, None)

    def _tokenise(self, request: Request, choice: dict[str, Any], count: int | None) -> list[int]:
        """Ids of an answer that came as text, `count` of them generated (None: not told)."""
        text, stopped = choice.get("text"), choice["finish_reason"] == "stop"
        if not isinstance(text, str) or not (text or (stopped and count)):
            raise Failed("the response holds an empty answer")
        if stopped:
            ending = next((t for t in self._eos_texts.values() if t and text.endswith(t)), "")
            text = text.removesuffix(ending)
        if "\ufffd" in text:
            raise Unverified("answer holds bytes that are no text")
        before = self._decode(request.prompt)
        whole = self._encode(before + text)
        head = len(request.prompt)
        same = whole[:head] == request.prompt
        tokens = whole[head:] if same else self._encode(text)
        if self._decode([*request.prompt, *tokens]) != before + text:
            raise Unverified("answer reads differently when re-tokenised")
        if stopped:
            tokens = [*tokens, self._ended_by(choice)]
        # Whether the token that ended the turn is counted depends on the server.
        if count is not None and count not in {len(tokens), len(tokens) - stopped}:
            raise Unverified(SAME_NUMBER)
        if len(tokens) > request.max_tokens + stopped:
            raise Unverified(SAME_NUMBER)
        return tokens

    def _ended_by(self, choice: dict[str, Any]) -> int:
        """The token that ended the turn: told by vLLM or SGLang, else the template's own."""
        told = (choice.get("stop_reason"), choice.get("matched_stop"))
        return next((i for i in told if isinstance(i, int)), self._turn_end)

    def _as_text(self, prompt: list[int]) -> str:
        """The prompt as text that a server reads as the same ids, with the BOS it adds."""
        bos = self.template.bos_id
        ids = prompt[1:] if bos is not None and prompt[:1] == [bos] else prompt
        text = self._decode(ids)
        if self._encode(text) != ids:
            raise Unverified("prompt cannot be given to the endpoint as text")
        return text

    def _decode(self, ids: list[int]) -> str:
        return self.template.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.template.tokenizer(text, add_special_tokens=False)["input_ids"])


def _end_of_turn(template: ChatTemplate) -> int:
    """The token that the template sets after an answer. Raises `InputError` when none is known."""
    plain = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    try:
        ids, mask, _ = template.mask(plain)
    except Unverified:
        ids, mask = [], []
    said = [i for i, supervised in zip(ids, mask, strict=True) if supervised]
    end = said[-1] if said and said[-1] in template.eos_ids else template.tokenizer.eos_token_id
    if end is None:
        raise InputError("the verifier's tokenizer has no token that ends a turn")
    return end


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _refuse(request: Request, reason: str, again: bool = False) -> Refused:
    return Refused(request.key, request.prompt, [], "refused", None, reason, again)


def _headers() -> dict[str, str]:
    key = os.environ.get(API_KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise InputError(f"{API_KEY}: it holds characters that no key has")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _check(response: httpx.Response) -> None:
    """Raises `Failed`, `TurnedDown` or `Misfit` unless the status is 200."""
    status = response.status_code
    if status == 200:
        return
    message = f"HTTP {status}: {_complaint(response)}"
    if status in (400, 413, 422):
        raise TurnedDown(message, status)
    if status in (408, 425, 429) or status >= 500:
        wait = response.headers.get("retry-after", "")
        raise Failed(message, float(wait) if wait.isdecimal() else 0.0, busy=status == 429)
    if status in (401, 403):
        message += f"; set the environment variable {API_KEY} to a key that it accepts"
    elif status in (404, 405):
        message += "; a base URL usually ends in /v1"
    raise Misfit(message)


def _complaint(response: httpx.Response) -> str:
    """What the server says is wrong, in at most 300 characters of one line."""
    try:
        given = response.json()
        found = given.get("error", given)
        text = found["message"] if isinstance(found, dict) else found
    except (ValueError, KeyError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300] or response.reason_phrase


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        return response.json()
    except ValueError:
        raise Failed("the response is no JSON") from None


def _models(response: httpx.Response) -> list[dict[str, Any]]:
    try:
        return [m for m in _json(response)["data"] if isinstance(m["id"], str)]
    except (KeyError, TypeError):
        raise Failed("its list of models cannot be read") from None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
