"""Makes the missing shards of a lane with one engine.

The main thread feeds the engine and takes its answers; writer threads check, compress and write.
A sample that fails is tried again alone, then left out with its reason.

Lanes of two runs may need the same shards. A shard that somebody else is making (it has a lease,
`aerie.common.leases`) is put off to the end; by then it exists, or it is made here if the other
run is gone.

The engine computes one shard at a time. In bf16 the last bits of a sample's states depend on what
it is batched with, so only a shard that is computed by itself is the same after any history.
"""

import concurrent.futures
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from aerie.common.errors import UnusableStates
from aerie.common.leases import POLL_SECONDS, Leases
from aerie.common.progress import JobProgress
from aerie.engine.protocol import Answer, EngineDied, Failure, Request, VerifierEngine
from aerie.extraction.verdict import StatesCheck
from aerie.extraction.work import LaneWork, too_few
from aerie.extraction.writer import ShardWriter
from aerie.samples.file import TokenizedSample
from aerie.samples.shards import ShardPlan
from aerie.states.facts import write_nothing_kept
from aerie.states.teacher import Teacher
from aerie.states.writers import writers

MAX_ENGINES = 3
"""Engines that a lane starts: after two deaths with the same sample it continues without it."""

MAX_WRITING = 8
"""Most shards that wait for a writer; later ones stay free for other lanes."""


@dataclass
class LaneCounts:
    """What a lane did, and the `seconds` it took. `adopted_samples` came from shards that another
    run made meanwhile."""

    extracted_samples: int = 0
    extracted_tokens: int = 0
    adopted_samples: int = 0
    copied_samples: int = 0
    seconds: float = 0.0


class LaneExtractor:
    """Extracts the missing samples of a lane and writes its missing shards.

    `staging_bytes`: most bytes of states that wait for their shard. `left_out`: samples that are
    given up, with the reason. `progress` is updated for each sample, and has beats for each
    sample written and while the lane waits for another run.
    """

    def __init__(
        self,
        work: LaneWork,
        load_teacher: Callable[[], Teacher],
        progress: JobProgress,
        leases: Leases,
        staging_bytes: int,
        min_kept_share: float,
    ):
        self.work, self.progress, self.leases = work, progress, leases
        self.staging_bytes, self.min_kept_share = staging_bytes, min_kept_share
        self.counts = LaneCounts(copied_samples=work.number_to_copy())
        self.left_out = dict(work.left_out)
        self.verdict = StatesCheck(work.store, load_teacher)
        self.writer = ShardWriter(work, self.verdict, progress.beat)
        # Before the engine, which binds the main thread to one core.
        self.pool = writers(2)
        self.writing: dict[concurrent.futures.Future[dict[str, str]], ShardPlan] = {}
        self.todo = deque(work.missing)
        """Shards that are not begun."""
        self.batch: deque[TokenizedSample] = deque()
        """Samples of the current shard that are not yet given to the engine."""
        self.flying: dict[str, str] = {}
        """Samples in the engine, by the key of their request."""
        self.again: deque[str] = deque()
        """Samples that failed once."""
        self.awaited = {
            s.id: {i for i in s.samples if work.keys[i] not in work.found} for s in work.missing
        }
        """By shard: samples to come before it can be written."""
        self.staged: dict[str, int] = {}
        """By sample: bytes of states in an unwritten shard, computed or about to be."""
        self.empty: list[ShardPlan] = []
        """Finished shards of which nothing could be kept."""
        self._shard_of = {i: s for s in work.missing for i in s.samples}
        self._came: set[str] = set()
        self._tried: set[str] = set()
        self._waits_for = 0

    def run(self, start_engine: Callable[[], AbstractContextManager[VerifierEngine]]) -> None:
        """Make the missing shards; starts an engine only if a sample has to be extracted.

        Raises `InputError` as soon as fewer than `min_kept_share` of the lane's samples can be
        kept, `UnusableStates` if the engine's states are wrong throughout, `EngineError`.
        """
        try:
            self._make_shards(start_engine)
            self.verdict.finish()
        except UnusableStates:
            self.verdict.set_aside()
            raise
        self._record_empty()

    def _make_shards(
        self, start_engine: Callable[[], AbstractContextManager[VerifierEngine]]
    ) -> None:
        with self.pool:  # whatever happens, complete shards are written
            self._check_kept()
            engines = 0
            while self.todo or self.batch or self.again or self.writing:
                if not (self.batch or self.again or self._begin()):
                    self._wait()
                    continue
                engines += 1
                try:
                    with start_engine() as engine:
                        for answer in engine.run(self._requests(engine.max_model_len)):
                            self._take(answer)
                except EngineDied as error:
                    if engines == MAX_ENGINES:
                        raise EngineDied(
                            f"{engines} engines died, the last one with {error}. Finished shards "
                            "are kept; see the engine's log above, then run again"
                        ) from error
                    for identity in list(self.flying.values()):
                        self._fail(identity, f"the engine died with it: {error}")
                    self.flying.clear()

    # What the engine computes

    def _requests(self, max_model_len: int) -> Iterator[Request | None]:
        """What the engine should compute next; None if nothing can be computed now.

        A shard is begun when the one before is computed and its own states fit into the staging
        folder, or nothing is being written that would make room. A sample that failed flies alone.
        """
        while True:
            self._collect()
            if self.batch:
                sample = self.batch.popleft()
                length = len(sample.input_ids)
                if length < max_model_len:
                    yield self._request(sample.id, sample.id)
                else:
                    self._leave_out(
                        sample.id, f"{length} tokens; the engine takes {max_model_len - 1}"
                    )
            elif self.flying:
                yield None
            elif self.again:
                identity = self.again.popleft()
                yield self._request(identity, f"{identity}-again")
            elif self._begin():
                continue
            elif self.todo or self.writing:
                self._wait()
            else:
                return

    def _request(self, identity: str, key: str) -> Request:
        self.flying[key] = identity
        return Request(key, self.work.samples[identity].input_ids, 1)

    def _begin(self) -> bool:
        """Begin the next shard that needs the engine and that nobody else is making.

        On the way, takes over shards that exist by now and submits those that need no engine.
        """
        for _ in range(len(self.todo)):
            shard = self.todo[0]
            samples = self.work.to_extract(shard)
            sizes = {s.id: self.work.states_bytes(s) for s in samples}
            fits = sum(self.staged.values()) + sum(sizes.values()) <= self.staging_bytes
            if len(self.writing) >= MAX_WRITING or (self.writing and not fits):
                return False
            if not self.leases.take(self.work.store.path(shard.id)):
                self.todo.rotate(-1)
                continue
            self.todo.popleft()
            if self._waits_for:
                self._waits_for = 0
                self.progress.enter("working")
            if self.work.usable(shard):
                self._adopt(shard)
            elif not samples:
                self._submit(shard)
            else:
                self.batch.extend(samples)
                self.staged |= sizes
                return True
        return False

    def _adopt(self, shard: ShardPlan) -> None:
        """Take over a shard that somebody else has made meanwhile."""
        left_out = {i: why for i in shard.samples if (why := self.work.left_out.get(i))}
        kept = [i for i in shard.samples if i not in left_out]
        self.counts.adopted_samples += sum(self.work.keys[i] not in self.work.found for i in kept)
        self.left_out |= left_out
        self.leases.release(self.work.store.path(shard.id))
        self._check_kept()
        self._show_progress()

    def _wait(self) -> None:
        """Wait for a writer, or for other runs if they make all that is left."""
        if self.writing:
            concurrent.futures.wait(self.writing, return_when=concurrent.futures.FIRST_COMPLETED)
            self._collect()
        elif self.todo:
            self._record_empty()  # otherwise two lanes would wait for each other
            if self._waits_for != len(self.todo):
                self._waits_for = len(self.todo)
                who = self.leases.holder(self.work.store.path(self.todo[0].id)) or "another"
                print(f"waiting for {self._waits_for} shards made by {who}", flush=True)
                self.progress.enter("waiting")
            self.progress.beat()
            time.sleep(POLL_SECONDS)

    # What becomes of a sample

    def _take(self, answer: Answer) -> None:
        identity = self.flying.pop(answer.key)
        if isinstance(answer, Failure):
            self._fail(identity, answer.reason)
        elif answer.states is None:
            self._fail(identity, "the engine gave no states")
        else:
            self.writer.add(identity, answer.states, answer.tokens[0])
            if identity not in self._came:
                self._came.add(identity)
                self.counts.extracted_samples += 1
                self.counts.extracted_tokens += len(answer.prompt)
            self._done_with(identity)
            self._show_progress()

    def _fail(self, identity: str, reason: str) -> None:
        """Try a sample again alone after its first failure; leave it out after its second."""
        if identity in self._tried:
            self._leave_out(identity, reason)
        else:
            self._tried.add(identity)
            self.again.append(identity)

    def _leave_out(self, identity: str, reason: str) -> None:
        self.left_out[identity] = reason
        self._check_kept()
        self._done_with(identity)

    def _check_kept(self) -> None:
        wanted = len(self.work.keys)
        if len(self.left_out) > wanted - math.ceil(self.min_kept_share * wanted):
            raise too_few(self.work, self.left_out, self.min_kept_share)

    def _show_progress(self) -> None:
        done = self.counts.extracted_samples + self.counts.adopted_samples
        tokens = self.counts.extracted_tokens
        self.progress.update(done, f"{tokens} tokens", tokens=tokens)

    # What becomes of a shard

    def _done_with(self, identity: str) -> None:
        shard = self._shard_of[identity]
        self.awaited[shard.id].discard(identity)
        if not self.awaited[shard.id]:
            self._submit(shard)

    def _submit(self, shard: ShardPlan) -> None:
        """Hand a shard, whose samples have all come or are left out, to a writer."""
        left_out = {i: self.left_out[i] for i in shard.samples if i in self.left_out}
        self.writing[self.pool.submit(self.writer.write, shard, left_out)] = shard

    def _collect(self) -> None:
        """Take the results of writers that have finished."""
        for future in [f for f in self.writing if f.done()]:
            shard = self.writing.pop(future)
            wrong = future.result()
            # All of them, before the first of them could complete the shard.
            self.awaited[shard.id].update(wrong)
            for identity, reason in wrong.items():
                self._fail(identity, reason)
            if wrong:
                continue
            for identity in shard.samples:
                self.staged.pop(identity, None)
            if all(identity in self.left_out for identity in shard.samples):
                self.empty.append(shard)
            else:
                self.leases.release(self.work.store.path(shard.id))

    def _record_empty(self) -> None:
        """Record of which shards nothing could be kept, so that nobody tries them again.

        Only when the lane's own work is done: if a lane keeps too few samples and fails, the next
        run tries all of them again.
        """
        while self.empty:
            shard = self.empty.pop()
            path = self.work.store.path(shard.id)
            left_out = {self.work.keys[i]: self.left_out[i] for i in shard.samples}
            if not os.path.lexists(path):  # another run may have succeeded
                write_nothing_kept(path, left_out)
            self.leases.release(path)
