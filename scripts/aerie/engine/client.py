"""HTTP requests to servers of the verifier that speak OpenAI's protocol."""

import time
from typing import Any

import httpx

from aerie.chat.unverified import Unverified
from aerie.engine.completions import TokenCodec
from aerie.engine.protocol import Answer, Refused, Request
from aerie.engine.responses import (
    RequestFailed,
    RequestRejected,
    ServerUnfit,
    check_status,
    describe_error,
    headers,
    read_json,
    read_models,
)
from aerie.engine.servers import EndpointError, Patience, PromptForm, Server


def refuse(request: Request, reason: str, again: bool = False) -> Refused:
    return Refused(request.key, request.prompt, [], "refused", None, reason, again)


def first_model(urls: list[str], patience: Patience | None = None) -> str:
    """Name of the first model of the first server that answers.

    Raises `EndpointError` with every server's fault if none does.
    """
    patience = patience or Patience()
    faults: dict[str, str] = {}
    for attempt in range(3):
        if attempt:
            time.sleep(patience.wait(attempt))
        for url in urls:
            try:
                found = httpx.get(f"{url}/models", headers=headers(), timeout=patience.connect)
                check_status(found)
                name: str = read_models(found)[0]["id"]
                return name
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                faults[url] = describe_error(error)
            except (RequestFailed, ServerUnfit, RequestRejected) as error:
                faults[url] = str(error)
            except IndexError:
                faults[url] = "it serves no model"
    raise EndpointError(
        "no endpoint says which model it serves",
        faults,
        "Start the servers or correct generation.endpoints. With generation.endpoint_model set, "
        "answers kept earlier are found without them",
    )


class Client:
    """Asks servers for completions of `model`.

    `max_model_len`: longest prompt with answer that a server must accept, tokens.
    """

    def __init__(self, model: str, codec: TokenCodec, max_model_len: int, patience: Patience):
        self.model, self.codec, self.max_model_len = model, codec, max_model_len
        self.patience = patience
        hello = codec.template.prompt_ids([{"role": "user", "content": "Hello"}])
        self._greeting = Request("", hello, 1)
        self._http = httpx.AsyncClient(
            headers=headers(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(patience.answer, connect=patience.connect, write=60.0, pool=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def open(self, server: Server) -> None:
        """Compare a server with the configuration; one that lists no models is trusted.

        A server that failed before must produce a token first: then no request is lost to a
        server that hangs, and a request that fails nevertheless is known to be the cause.
        Raises `ServerUnfit` or `RequestFailed`.
        """
        url, timeout = f"{server.url}/models", self.patience.probe
        try:
            response = await self._send("GET", url, timeout=timeout)
            if response.status_code not in (404, 405, 501):
                check_status(response)
                self._compare({m["id"]: m for m in read_models(response)})
            if server.failures:
                body = {"model": self.model, "max_tokens": 1, "temperature": 0.0}
                await self._complete(server, self._greeting, body, timeout=timeout)
        except RequestRejected as error:
            raise RequestFailed(str(error)) from None
        server.opened = True

    def _compare(self, models: dict[str, dict[str, Any]]) -> None:
        if self.model not in models:
            raise ServerUnfit(
                f"it serves {', '.join(models) or 'nothing'}, not {self.model}; correct "
                "generation.endpoints or generation.endpoint_model"
            )
        room = models[self.model].get("max_model_len")
        if isinstance(room, int) and room < self.max_model_len:
            raise ServerUnfit(
                f"it takes {room} tokens, samples.max_length is {self.max_model_len}; lower "
                "that or start the server with a larger window"
            )

    async def ask(self, server: Server, request: Request, body: dict[str, Any]) -> Answer:
        """Ask a server for one answer, after opening it if needed.

        `body`: fields that do not depend on the prompt. Raises `ServerUnfit`, `RequestFailed` or
        `RequestRejected`.
        """
        failed_before = server.failures > 0
        try:
            if not server.opened:
                await self.open(server)
            form, response = await self._complete(server, request, body)
            return self.codec.read(request, read_json(response), form)
        except Unverified as error:
            return refuse(request, error.reason)
        except RequestFailed as error:
            error.suspect = failed_before and server.opened
            raise

    async def _complete(
        self, server: Server, request: Request, body: dict[str, Any], **options: Any
    ) -> tuple[PromptForm, httpx.Response]:
        """Send a request in the first form that the server accepts, and remember that form.

        Raises `Unverified` if that form cannot hold it, `RequestRejected` if none is accepted.
        """
        rejected: RequestRejected | None = None
        for form in PromptForm if server.form is None else (server.form,):
            full = {**body, **self.codec.payload(request, form)}
            response = await self._send("POST", f"{server.url}/completions", json=full, **options)
            try:
                check_status(response)
            except RequestRejected as error:
                rejected = error
                continue
            server.form = form if server.form is None else min(form, server.form)
            return form, response
        assert rejected is not None
        raise rejected

    async def _send(self, method: str, url: str, **options: Any) -> httpx.Response:
        try:
            return await self._http.request(method, url, **options)
        except httpx.InvalidURL as error:
            raise ServerUnfit(describe_error(error)) from None
        except httpx.HTTPError as error:
            raise RequestFailed(describe_error(error)) from None
