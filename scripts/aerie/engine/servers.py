"""The state of each server: whether it answers, how much it is given, how long it is waited for."""

import random
import sys
import time
from dataclasses import dataclass
from enum import IntEnum

from aerie.common.errors import EngineError


class PromptForm(IntEnum):
    """How a request is sent; a server gets the first form that it accepts."""

    IDS = 0
    """Token ids."""
    TEXT = 1
    """Text."""
    PLAIN = 2
    """Text, with only the fields that OpenAI defines."""


class EndpointError(EngineError):
    """No server works, or one is not what the configuration says.

    `problem`: what is wrong in a few words. `faults`: URL → reason. `advice`: what to do.
    """

    def __init__(self, problem: str, faults: dict[str, str], advice: str = ""):
        lines = [f"  {url}: {fault}" for url, fault in faults.items()]
        super().__init__("\n".join([f"{problem}:", *lines, *([advice] if advice else [])]))
        self.problem, self.faults = problem, faults


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server, in seconds.

    The wait after a failure doubles from `first` to `most`; after `tries` failures without an
    answer in between a server counts as dead (after about two minutes with these defaults).
    A request that fails `tries` times while others are answered is given up. `connect`, `probe`
    and `answer`: limits for a connection, for the first response of a server, for a whole answer.
    """

    first: float = 1.0
    most: float = 60.0
    tries: int = 8
    connect: float = 10.0
    probe: float = 60.0
    answer: float = 3600.0

    def wait(self, failures: int) -> float:
        """Seconds to wait after this many failures: half to all of the full wait, at random."""
        return random.uniform(0.5, 1.0) * min(self.most, self.first * 2.0 ** (failures - 1))


class Server:
    """One server.

    `form`: how requests are sent to it, None until one was accepted. `room`: requests at a time;
    after a failure this is 1, and every answer doubles it again. `opened`: it was compared with
    the configuration and has not failed since. `given_up`: requests that it could not answer
    since its last answer.
    """

    def __init__(self, url: str, concurrency: int, patience: Patience):
        self.url, self.concurrency, self.patience = url, concurrency, patience
        self.form: PromptForm | None = None
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
        """Record the failure of a request begun at `started` (monotonic s).

        Failures of one outage count once. `wait`: seconds the server asked for.
        """
        self.error = error
        if started < self._failed_at:
            return
        if not self.failures:
            print(f"{self.url} failed and is left out for now: {error}", file=sys.stderr)
        self.failures += 1
        self.room = 1
        self.opened = False
        self._failed_at = time.monotonic()
        wait = max(self.patience.wait(self.failures), min(wait, self.patience.most))
        self.rests_until = self._failed_at + wait

    def dismiss(self, error: str) -> None:
        """Stop using the server."""
        self.unfit, self.error = True, error
        print(f"{self.url} is left out: {error}", file=sys.stderr)
