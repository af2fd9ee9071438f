"""Reporting events of a run by a shell command and a webhook.

Messages about failures contain neither the address nor the answer: both may hold secrets.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Literal

from pydantic import ConfigDict

from aerie.common.records import Record
from aerie.config import Notify, load_config

SETTINGS = "AERIE_NOTIFY"
"""Environment variable with the section `notify` as JSON; unset when nothing is reported."""
TIMEOUT = 10.0  # seconds in all
LONGEST = 4000  # characters of a value


class FailedJob(Record):
    """A job that failed, in an event."""

    job: str
    """Its name."""
    state: str
    """`failed`, `stalled`, `stopped` or `dead`."""
    reason: str
    """Why, in words."""
    log: str
    """The log to read."""


class Event(Record):
    """What `notify.command` gets on its standard input and `notify.webhook_env`'s address as a
    POST. An event has only the keys that apply to it."""

    model_config = ConfigDict(extra="allow")

    event: Literal["stall", "failure", "end"]
    """`stall`: a job was stopped; `failure`, `end`: the run ended without or with its results."""
    run: str
    """Name of the run."""
    text: str
    """What happened, in a few lines; the key that chat services show."""
    host: str = ""
    """Where it was noticed."""
    time: float = 0.0
    """When it was sent, Unix seconds."""
    stage: str = ""
    """Of a stall: the rule."""
    part: str = ""
    """Of a stall: value of the rule's wildcard, `run` without one."""
    state: str = ""
    """Of a stall: `stalled` or `stopped`."""
    reason: str = ""
    """Of a stall: why, in words."""
    log: str = ""
    """Of a stall: the job's log."""
    folder: str = ""
    """Of a failure and an end: the run's folder."""
    jobs: list[FailedJob] = []
    """Of a failure and an end: the jobs that failed."""


def settings() -> Notify | None:
    """The section `notify` as the workflow passed it on; None when it is unset or not valid."""
    try:
        return load_config({"notify": json.loads(os.environ[SETTINGS])}).notify
    except Exception:
        return None


def send(to: Notify, event: Event) -> list[str]:
    """Report an event; returns what went wrong, in words. Never raises, takes `TIMEOUT` at most.

    The command gets the event as JSON, and each value that is text or a number as `AERIE_<KEY>`.
    """
    if event.event not in to.events:
        return []
    items = event.model_dump(mode="json", exclude_unset=True).items()
    values = {k: v[:LONGEST] if isinstance(v, str) else v for k, v in items}
    body = json.dumps({**values, "time": round(time.time(), 1)}).encode()
    ways: dict[str, Callable[[], str]] = {}
    if to.command:
        command = to.command
        ways["notify.command"] = lambda: _run(command, body, values)
    if to.webhook_env:
        variable = to.webhook_env
        ways["notify.webhook_env"] = lambda: _post(variable, body)
    wrong = dict.fromkeys(ways, f"no end within {TIMEOUT:.0f} s")

    def go(name: str) -> None:
        try:
            wrong[name] = ways[name]()
        except Exception as error:
            wrong[name] = type(error).__name__

    threads = [threading.Thread(target=go, args=[name], daemon=True) for name in ways]
    end = time.monotonic() + TIMEOUT
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return [f"this {event.event} was not reported by {k}: {v}" for k, v in wrong.items() if v]


def _run(command: str, body: bytes, event: dict[str, object]) -> str:
    """Run the command; why it failed, empty when it did not."""
    variables = {
        f"AERIE_{key.upper()}": str(value).replace("\0", " ")
        for key, value in event.items()
        if isinstance(value, str | int | float)
    }
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A supervisor blocks the signals that end it; a command must not inherit that.
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
        env={**os.environ, **variables},
    )
    try:
        process.communicate(body, timeout=TIMEOUT - 1)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        return f"no end within {TIMEOUT - 1:.0f} s; it was killed"
    return f"it ended with status {process.returncode}" if process.returncode else ""


def _post(variable: str, body: bytes) -> str:
    """Post it to the address in this environment variable; why it failed, empty when it did not."""
    address = os.environ.get(variable, "").strip()
    if not address:
        return f"the environment variable {variable} is not set"
    if not address.startswith(("http://", "https://")):
        return f"the environment variable {variable} holds no http(s) address"
    headers = {"Content-Type": "application/json", "User-Agent": "aerie"}
    request = urllib.request.Request(address, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT - 1):
            return ""
    except urllib.error.HTTPError as error:
        return f"the server answered with status {error.code}"
    except urllib.error.URLError as error:
        return f"the server cannot be reached ({type(error.reason).__name__})"
