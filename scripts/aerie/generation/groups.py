"""Groups of records that one run answers at a time, so that two runs share the work."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from aerie.common.files import digest
from aerie.common.leases import POLL_SECONDS, Leases
from aerie.generation.answers import AnswerStore
from aerie.samples.stored_answer import StoredAnswer


class Groups:
    """Records to answer, group by group, with a lease on each group.

    A group that another run answers now comes last: its answers are then found in the store, or
    given here if the other run is gone.

    Iterate while `left()` is true; a None means that there is no record now. `adopt(answer)` is
    called with each answer that another run gave meanwhile, `idle(message)` again and again while
    there is nothing to do but wait for another run.
    """

    def __init__(
        self,
        groups: list[list[dict[str, Any]]],
        known: dict[str, StoredAnswer],
        answers: AnswerStore,
        leases: Leases,
        adopt: Callable[[StoredAnswer], None],
        idle: Callable[[str], None],
    ):
        self.answers, self.leases, self.adopt, self.idle = answers, leases, adopt, idle
        self.paths = [answers.folder / digest([r["id"] for r in group]) for group in groups]
        self.group_of = {r["id"]: n for n, group in enumerate(groups) for r in group}
        self.todo = deque(
            (n, missing)
            for n, group in enumerate(groups)
            if (missing := [r for r in group if r["id"] not in known])
        )
        self.open: Counter[int] = Counter()
        self._others: dict[str, StoredAnswer] = {}
        self._records = self._draw()

    def left(self) -> bool:
        return bool(self.todo)

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        return self._records

    def _draw(self) -> Iterator[dict[str, Any] | None]:
        while self.todo:
            for _ in range(len(self.todo)):
                group, missing = self.todo[0]
                if self.leases.take(self.paths[group]):
                    self.todo.popleft()
                    yield from self._begin(group, missing)
                    break
                self.todo.rotate(-1)
            else:
                if self.open.total():
                    yield None
                else:
                    who = self.leases.holder(self.paths[self.todo[0][0]]) or "another run"
                    self.idle(
                        f"waiting for {who}, which is answering {len(self.todo)} groups of records"
                    )
                    time.sleep(POLL_SECONDS)

    def _begin(self, group: int, missing: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        self._others |= self.answers.load_new()
        wanted = []
        self.open[group] = len(missing)
        for record in missing:
            found = self._others.pop(record["id"], None)
            if found is None or found.again:
                wanted.append(record)
            else:
                self.adopt(found)
        yield from wanted

    def finish(self, identity: str) -> int | None:
        """Note that a record has its answer; returns its group's number if it was the last."""
        group = self.group_of[identity]
        self.open[group] -= 1
        return None if self.open[group] else group

    def release(self, group: int) -> None:
        self.leases.release(self.paths[group])
