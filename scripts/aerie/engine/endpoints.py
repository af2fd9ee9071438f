"""Several servers side by side in place of the job's own engine: who gets which request, and what
becomes of a request that fails."""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aerie.chat.template import ChatTemplate
from aerie.engine.client import Client, refuse
from aerie.engine.completions import TokenCodec
from aerie.engine.protocol import Answer, Request
from aerie.engine.responses import RequestFailed, RequestRejected, ServerUnfit
from aerie.engine.servers import EndpointError, Patience, Server


@dataclass
class _Job:
    """A request to be answered.

    `failures`: how often it failed while the servers answered others. `seen`: how many answers
    all servers had given when it last failed, None before its first failure.
    """

    request: Request
    failures: int = 0
    seen: int | None = None


class Endpoints:
    """Servers of one model.

    `urls`: base URLs, such as `http://host:8000/v1`. `template`: the verifier's; the servers must
    use the same tokenizer. `concurrency`: requests at a time per server. `max_model_len`: longest
    prompt with answer, tokens.

    Raises `EndpointError` if a server that responds serves another model, accepts fewer than
    `max_model_len` tokens or denies access. One that does not respond yet is tried again later.
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
        self.max_model_len = max_model_len
        self.patience = patience or Patience()
        self.servers = [Server(url, concurrency, self.patience) for url in urls]
        self.codec = TokenCodec(template)
        self._runner = asyncio.Runner()
        self._client = Client(model, self.codec, max_model_len, self.patience)
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
        """Answer requests as `VerifierEngine.run` describes.

        A failed request is asked again later, at any server. One that cannot be answered yields a
        `Refused`. Raises `EndpointError` if requests are left and all servers are dead.
        """
        limit = concurrency or sum(s.concurrency for s in self.servers)
        again: deque[_Job] = deque()
        flying: dict[asyncio.Task[Answer], tuple[Server, _Job, float]] = {}

        def draw() -> _Job | None:
            if again:
                return again.popleft()
            request = next(requests, None)
            return _Job(request) if request is not None else None

        def body(request: Request) -> dict[str, Any]:
            common = {"model": self._client.model, "temperature": temperature, "top_p": top_p}
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
                    ask = self._client.ask(server, job.request, body(job.request))
                    task = self._runner.get_loop().create_task(ask)
                    flying[task] = server, job, time.monotonic()
                if not flying:
                    if (job := draw()) is None:
                        return
                    if dead:
                        raise self._all_dead()
                    again.appendleft(job)
                for task in self._runner.run(self._wait(list(flying))):
                    answer = self._settle(task, *flying.pop(task), again)
                    if answer is not None:
                        yield answer
        finally:
            if not all(task.done() for task in flying):
                self._runner.run(_cancel(set(flying)))

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        self._runner.run(self._shut())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _shut(self) -> None:
        current = {task for task in [asyncio.current_task()] if task is not None}
        await _cancel(asyncio.all_tasks() - current)
        await self._client.close()

    async def _open_all(self) -> None:
        started = time.monotonic()
        opened = await asyncio.gather(*map(self._client.open, self.servers), return_exceptions=True)
        for server, fault in zip(self.servers, opened, strict=True):
            if isinstance(fault, ServerUnfit):
                problem = "an endpoint does not fit the configuration"
                raise EndpointError(problem, {server.url: str(fault)})
            if isinstance(fault, RequestFailed):
                server.fail(str(fault), started, fault.wait)
            elif fault is not None:
                raise fault

    def _free(self) -> Server | None:
        now = time.monotonic()
        free = [s for s in self.servers if s.free(now)]
        return min(free, key=lambda s: s.flying / s.room) if free else None

    async def _wait(self, flying: list[asyncio.Task[Answer]]) -> set[asyncio.Task[Answer]]:
        """Wait until a task finishes or a resting server may be asked again."""
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
        job: _Job,
        started: float,
        again: deque[_Job],
    ) -> Answer | None:
        """The answer of a finished task; None if its job was put into `again`."""
        server.flying -= 1
        request = job.request
        try:
            answer = task.result()
        except ServerUnfit as error:
            server.dismiss(str(error))
        except RequestRejected as error:
            if server.form is not None:
                print(f"{server.url}, record {request.key}: {error}", file=sys.stderr)
                reason = f"the endpoint refuses the request (HTTP {error.status})"
                return refuse(request, reason, again=True)
            server.fail(str(error), started)
        except RequestFailed as error:
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
                return refuse(request, "the endpoint fails on the request", again=True)
        else:
            server.succeed()
            return answer
        again.append(job)
        return None

    def _all_dead(self) -> EndpointError:
        faults = {s.url: s.error for s in self.servers}
        return EndpointError("no endpoint works any more", faults)


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
