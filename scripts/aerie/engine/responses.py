"""HTTP responses of OpenAI-compatible servers: their statuses and lists of models."""

import os
from typing import Any

import httpx

from aerie.common.errors import InputError

API_KEY = "AERIE_API_KEY"
"""The environment variable with the key for all servers; a key is read from nowhere else."""


class ServerUnfit(Exception):
    """A server that waiting does not fix: another model, no permission, a wrong address."""


class RequestFailed(Exception):
    """A request worth asking again. `wait`: seconds the server asked for.

    `busy`: the server only has too much to do. `suspect`: the server had just answered another
    request, so this one may be the cause.
    """

    def __init__(self, message: str, wait: float = 0.0, busy: bool = False):
        super().__init__(message)
        self.wait, self.busy, self.suspect = wait, busy, False


class RequestRejected(Exception):
    """A request that the server calls invalid. `status`: the HTTP status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def headers() -> dict[str, str]:
    """The header with the key, if there is one. Raises `InputError` for a key that cannot be."""
    key = os.environ.get(API_KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise InputError(f"{API_KEY}: contains characters that cannot be part of a key")
    return {"Authorization": f"Bearer {key}"} if key else {}


def check_status(response: httpx.Response) -> None:
    """Raise `RequestFailed`, `RequestRejected` or `ServerUnfit` unless the status is 200."""
    status = response.status_code
    if status == 200:
        return
    message = f"HTTP {status}: {_complaint(response)}"
    if status in (400, 413, 422):
        raise RequestRejected(message, status)
    if status in (408, 425, 429) or status >= 500:
        wait = response.headers.get("retry-after", "")
        raise RequestFailed(message, float(wait) if wait.isdecimal() else 0.0, busy=status == 429)
    if status in (401, 403):
        message += f"; set the environment variable {API_KEY} to a key that it accepts"
    elif status in (404, 405):
        message += "; a base URL usually ends in /v1"
    raise ServerUnfit(message)


def _complaint(response: httpx.Response) -> str:
    """The server's error message, at most 300 characters on one line."""
    try:
        given = response.json()
        found = given.get("error", given)
        text = found["message"] if isinstance(found, dict) else found
    except (ValueError, KeyError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300] or response.reason_phrase


def read_json(response: httpx.Response) -> dict[str, Any]:
    """The response's JSON. Raises `RequestFailed` if it is not JSON."""
    try:
        found: dict[str, Any] = response.json()
    except ValueError:
        raise RequestFailed("the response is not JSON") from None
    return found


def read_models(response: httpx.Response) -> list[dict[str, Any]]:
    """The models that the server lists. Raises `RequestFailed` if the list cannot be read."""
    try:
        return [m for m in read_json(response)["data"] if isinstance(m["id"], str)]
    except (KeyError, TypeError):
        raise RequestFailed("its list of models cannot be read") from None


def describe_error(error: Exception) -> str:
    """Name and message of an exception of httpx, which may have an empty message."""
    return f"{type(error).__name__}: {error}".rstrip(": ")
