"""Telling people of an event by a shell command and a webhook.

What goes wrong is told in words without the address and without what was answered: both may hold
secrets.
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
from typing import Any

from aerie.config import Notify, load_config

SETTINGS = "AERIE_NOTIFY"
"""Environment variable with the section `notify` as JSON; not there when nobody is to be told."""
TIMEOUT = 10.0  # seconds for all of it
LONGEST = 4000  # characters of a value


def settings() -> Notify | None:
    """The section `notify` as the workflow handed it on; None when there is none to obey."""
    try:
        return load_config({"notify": json.loads(os.environ[SETTINGS])}).notify
    except Exception:
        return None


def send(to: Notify, event: dict[str, Any]) -> list[str]:
    """Tell of an event; returns what went wrong, in words. Never raises, takes `TIMEOUT` at most.

    `event`: `event` (`failure`, `stall` or `end`), `run`, `text` (what happened, in a line or
    two; chat services show this key) and whatever else is known. The command gets it as JSON, and
    each of its values that is text or a number as `AERIE_<KEY>`.
    """
    if event["event"] not in to.events:
        return []
    event = {k: v[:LONGEST] if isinstance(v, str) else v for k, v in event.items()}
    body = json.dumps({**event, "time": round(time.time(), 1)}).encode()
    ways: dict[str, Callable[[], str]] = {}
    if to.command:
        ways["notify.command"] = lambda: _run(to.command, body, event)
    if to.webhook_env:
        ways["notify.webhook_env"] = lambda: _post(to.webhook_env, body)
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
    return [f"nobody was told of this {event['event']} by {k}: {v}" for k, v in wrong.items() if v]


def _run(command: str, body: bytes, event: dict[str, Any]) -> str:
    """Run the command; why it failed, empty when it did not."""
    values = {
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
        # A supervisor blocks those that end it; a command must not inherit that.
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
        env={**os.environ, **values},
    )
    try:
        process.communicate(body, timeout=TIMEOUT - 1)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        return f"no end within {TIMEOUT - 1:.0f} s; it was killed"
    return f"it ended with status {process.returncode}" if process.returncode else ""


def _post(variable: str, body: bytes) -> str:
    """Post it to the address that this environment variable holds."""
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
