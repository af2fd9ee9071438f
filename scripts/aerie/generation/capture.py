"""Shards made of the hidden states that the engine saves while it answers."""

import concurrent.futures
from collections.abc import Callable
from pathlib import Path

from aerie.common.errors import UnusableStates
from aerie.config import HiddenStates, Samples
from aerie.engine.captured import read_captured
from aerie.samples.conversion import Dropped, samples_of_answer
from aerie.samples.file import TokenizedSample
from aerie.samples.shards import ShardPlan, Splits, group_splits, plan_shard
from aerie.samples.stored_answer import StoredAnswer
from aerie.states.room import check_room
from aerie.states.shard import Sample
from aerie.states.store import Store, write_shard
from aerie.states.teacher import Teacher, find_mismatched_samples
from aerie.states.writers import writers

TEACHER_TOKENS = 8
"""Generated tokens of a sample that the teacher compares with its captured states."""


class Capture:
    """Makes shards of the states that arrive with the answers, as soon as a group is complete.

    These groups are left to the extraction: one with an answer that has no states (it was kept
    from an earlier run), one whose states fail a check, and one that is begun while `staging_bytes`
    of states already wait for others. Raises `InputError` when the shards no longer fit on the disk
    or into `hidden_states.max_gib`.

    `beat`: called for each sample written, by the thread that writes. `written`: called by it with
    the number of each group that it has finished.
    """

    def __init__(
        self,
        store: Store,
        teacher: Teacher,
        splits: Splits,
        settings: Samples,
        hidden_states: HiddenStates,
        *,
        greedy: bool,
        staging_bytes: int,
        beat: Callable[[], None] = lambda: None,
    ):
        self.store, self.teacher, self.settings, self.greedy = store, teacher, settings, greedy
        self.staging_bytes, self.max_gib, self.beat = staging_bytes, hidden_states.max_gib, beat
        self.groups = group_splits(splits, hidden_states.samples_per_shard)
        self.group_of = {r["id"]: n for n, (_, group) in enumerate(self.groups) for r in group}
        self.missing = [len(records) for _, records in self.groups]
        self.left = [False] * len(self.groups)
        self.answers: dict[str, StoredAnswer] = {}
        self.states: dict[str, Path] = {}
        self.staged: dict[str, int] = {}
        self.shards = 0
        self.tokens = 0
        self.failed: list[str] = []
        self.written: Callable[[int], None] = lambda _: None
        self._pool = writers(1)
        self._writing: list[concurrent.futures.Future[None]] = []

    def take(self, answer: StoredAnswer, states: Path | None) -> None:
        """An answer, and the file of its last sample's states, which is removed once it is read."""
        group = self.group_of[answer.id]
        self.answers[answer.id] = answer
        if states is None and not answer.dropped:
            self._leave(group)
        elif states is not None:
            size = states.stat().st_size
            # Dialogues that run already still end while new ones wait, and add to what is staged.
            while self._bytes() + size > self.staging_bytes and self._busy():
                concurrent.futures.wait(
                    self._writing, return_when=concurrent.futures.FIRST_COMPLETED
                )
            if self._bytes() + size > self.staging_bytes:
                self._leave(group)
            if self.left[group]:
                states.unlink()
            else:
                self.states[answer.id], self.staged[answer.id] = states, size
        self.missing[group] -= 1
        if self.missing[group] == 0:
            self._writing.append(self._pool.submit(self._write, group))
        self._busy()

    def full(self) -> bool:
        """Whether new dialogues should wait until a shard is written."""
        return self._bytes() > self.staging_bytes // 2 and self._busy()

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._busy()

    def _bytes(self) -> int:
        return sum(self.staged.copy().values())

    def _busy(self) -> bool:
        for future in [f for f in self._writing if f.done()]:
            self._writing.remove(future)
            future.result()
        return bool(self._writing)

    def _leave(self, group: int) -> None:
        """Give up the states of a group: the extraction makes them."""
        self.left[group] = True
        self._remove(group)

    def _remove(self, group: int) -> None:
        for record in self.groups[group][1]:
            if path := self.states.pop(record["id"], None):
                path.unlink(missing_ok=True)
            # Last, because the other thread uses the room at once.
            self.staged.pop(record["id"], None)

    def _write(self, group: int) -> None:
        split = self.groups[group][0]
        try:
            samples = self._samples(group)
            if not samples or any(states is None for _, states in samples):
                return
            last_state = self.store.convention.last_state
            shard = plan_shard(split, [sample for sample, _ in samples], last_state)
            if self.store.has(shard.id):
                return
            self._write_shard(shard, [(s, states) for s, states in samples if states])
            self.shards += 1
            self.tokens += shard.tokens
        except UnusableStates as error:
            self.failed.append(str(error))
        finally:
            self._remove(group)
            self.written(group)

    def _samples(self, group: int) -> list[tuple[TokenizedSample, Path | None]]:
        """The samples of a group, each with the file of its states if there is one."""
        split, records = self.groups[group]
        found: list[tuple[TokenizedSample, Path | None]] = []
        for record in records:
            answer = self.answers.pop(record["id"])
            states = self.states.get(record["id"])
            try:
                samples = samples_of_answer(record, split, answer, self.settings)
            except Dropped:
                continue
            # Only the last sample's states were captured.
            last = f"{record['id']}-{len(answer.samples) - 1}"
            single = len(answer.samples) == 1
            found += [(s, states if single or s.id == last else None) for s in samples]
        return found

    def _write_shard(self, shard: ShardPlan, captured: list[tuple[TokenizedSample, Path]]) -> None:
        check_room(self.store, shard.tokens, self.max_gib)
        samples, ends = [], []
        for sample, path in captured:
            states, tokens = read_captured(path)
            if tokens.tolist() != sample.input_ids:
                raise UnusableStates(
                    f"sample {sample.id}: the captured tokens are not those of the sample"
                )
            samples.append(Sample(sample.id, tokens, states, sample.loss_mask))
            following = [*sample.input_ids[sample.last_turn :], sample.next_token]
            ends.append((sample.id, states, following[-TEACHER_TOKENS:]))
        for identity, reason in find_mismatched_samples(self.teacher, ends, self.greedy).items():
            raise UnusableStates(f"sample {identity}: {reason}")
        write_shard(self.store, shard.id, samples, {}, self.beat)
