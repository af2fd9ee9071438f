"""One lane of extraction: fill the shards of its share that are missing, with one engine.

The main thread feeds the engine and takes what it computed; writer threads read the states back,
check, compress and write them. What fails is tried again alone, then left out with its reason.

Lanes of two runs may want the same shards: one that somebody else has in work (a lease beside it,
`aerie.common.leases`) is left for the end, and then found there, or made when the other is gone.

The engine computes one shard at a time. In bf16 a sample's states depend in their last bits on what
it is batched with, so only a shard that is computed by itself is the same whatever happened before.
"""

import concurrent.futures
import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import set_num_threads  # vLLM puts a function that does nothing in its place

from aerie.common.errors import AerieError, InputError, UnusableStates
from aerie.common.files import free_bytes, read_optional, write_json
from aerie.common.leases import POLL_SECONDS, Leases, lease_path
from aerie.engine.in_process import Answer, EngineDied, Failure, Request, read_captured
from aerie.samples.file import TokenizedSample
from aerie.states.shard import (
    Sample,
    Shard,
    Store,
    Teacher,
    check_states,
    checksum,
    file_checksum,
    judge_ranks,
)

MAX_ENGINES = 3
"""Engines a lane starts: one that dies twice over the same sample may go on without it."""

MAX_WRITING = 8
"""Shards that wait for a writer, at most; those after them stay free for other lanes."""

FEWEST_FOR_A_VERDICT = 8
"""Samples with the same fault in a shard from which on the fault is not theirs."""

ENOUGH_FOR_A_VERDICT = 32
"""Tokens that are judged together where there are fewer samples: of several small shards, or of
the ends of answers."""


def share(shards: list[dict[str, Any]], lane: int, lanes: int) -> list[dict[str, Any]]:
    """The shards of lane `lane` of `lanes`: every `lanes`-th."""
    return shards[lane::lanes]


# What lies beside a shard


def facts_path(shard: Path) -> Path:
    """The JSON file beside a shard: `bytes`, `checksum` (of the file), `left_out` (by key).

    Of a shard whose samples were all left out there is this file alone, with 0 `bytes`.
    """
    return shard.with_suffix(".json")


def write_shard(
    store: Store,
    shard: str,
    samples: list[Sample],
    left_out: dict[str, str],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Write a shard, and beside it its size and checksum and which samples it lacks, and why."""
    facts = facts_path(store.path(shard))
    if left_out or facts.exists():  # before the shard: a kill in between must not lose them
        write_json(facts, {"left_out": left_out})
    write_facts(store.write(shard, samples, beat), left_out)


def write_facts(path: Path, left_out: dict[str, str]) -> dict[str, Any]:
    facts = {
        "bytes": path.stat().st_size,
        "checksum": file_checksum(path),
        "left_out": left_out,
    }
    write_json(facts_path(path), facts)
    return facts


def read_facts(path: Path) -> dict[str, Any]:
    """The facts beside a shard; made anew when a kill came between the two files."""
    facts = read_optional(facts_path(path))
    if facts.keys() >= {"bytes", "checksum", "left_out"}:
        return facts
    return write_facts(path, facts.get("left_out", {}))


def write_nothing_kept(path: Path, left_out: dict[str, str]) -> None:
    """Say beside a shard that there is none, because each of its samples was left out."""
    write_json(facts_path(path), {"bytes": 0, "left_out": left_out})


def nothing_kept(path: Path) -> dict[str, str]:
    """Why each sample of a shard was left out, by key; empty when something of it was kept, or
    nothing is known of it."""
    facts = read_optional(facts_path(path))
    if facts.get("bytes") != 0 or os.path.lexists(path):
        return {}
    return facts.get("left_out", {})


def is_done(store: Store, shard: str) -> bool:
    """Whether the store holds the shard, or says that nothing of it could be kept."""
    return store.has(shard) or bool(nothing_kept(store.path(shard)))


# Disk space


def measured_ratio(store: Store, shards: int = 32) -> float:
    """Stored bytes by bf16 bytes in the first shards of the store, with 5 % more; 1 for none."""
    stored = raw = 0
    for path in sorted(store.folder.glob("*.safetensors"))[:shards]:
        try:
            with Shard(path) as shard:
                raw += sum(s["tokens"] for s in shard.samples) * store.convention.bytes_per_token()
                stored += shard.size
        except AerieError:
            continue
    return min(1.0, 1.05 * stored / raw) if raw else 1.0


def check_room(store: Store, tokens: int, max_gib: float | None) -> None:
    """Raise `InputError` with the figures when the states of `tokens` tokens do not fit.

    Into what is free on the store's disk, and, with all that is stored there, into `max_gib`.
    """
    if not tokens:
        return
    ratio, c = measured_ratio(store), store.convention
    needed = tokens * c.bytes_per_token() * ratio
    free, root = free_bytes(store.folder), store.folder.parent
    figures = (
        f"the states of {tokens:,} tokens take {needed / 2**30:.2f} GiB ({len(c.layer_ids)} states "
        f"of {c.hidden_size} x 2 bytes a token, stored at {ratio:.2f} of that)"
    )
    way = (
        "extract fewer samples (corpus.limit), or remove shards that nothing uses "
        "(scripts/store.py gc)"
    )
    if needed > free:
        raise InputError(
            f"{figures}, and {free / 2**30:.2f} GiB are free at {root}: make room, {way}"
        )
    if max_gib is not None:
        stored = 0
        for path in root.rglob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another run moves or collects it
                stored += path.stat().st_size
        if stored + needed > max_gib * 2**30:
            raise InputError(
                f"{figures}; with the {stored / 2**30:.2f} GiB in {root} that is more than "
                f"hidden_states.max_gib = {max_gib}: raise it, {way}"
            )


# What there is to do


class LaneWork:
    """What a lane still has to do.

    `missing`: shards that are absent, in somebody's work, or were damaged and have been moved
    aside. `found`: samples of theirs that another shard holds, by key: file and position.
    `left_out`: samples that the other shards lack, with the reason. `keys`: the key of each
    sample by its id.
    """

    def __init__(
        self, store: Store, rows: dict[str, TokenizedSample], shards: list[dict[str, Any]]
    ):
        self.store, self.rows, self.shards = store, rows, shards
        if lost := [i for s in shards for i in s["samples"] if i not in rows]:
            raise InputError(
                f"{len(lost)} samples of samples/shards.json are not in samples/samples.parquet "
                f"({', '.join(lost[:3])}); delete both and start the run again, they are made anew"
            )
        self.keys = {
            i: store.key(rows[i].input_ids, rows[i].loss_mask) for s in shards for i in s["samples"]
        }
        self.present: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        leased = {p.name for p in store.folder.glob(".*.lease")}
        self.missing = [
            s
            for s in shards
            if lease_path(store.path(s["id"])).name in leased or not self.usable(s)
        ]
        self.found = store.find_samples({self.keys[i] for s in self.missing for i in s["samples"]})

    def usable(self, shard: dict[str, Any]) -> bool:
        """Whether the shard is there and what its name says, or each of its samples was left out;
        what is not what it should be is moved aside."""
        path = self.store.path(shard["id"])
        if not os.path.lexists(path):
            reasons = nothing_kept(path)
            if not reasons or any(self.keys[i] not in reasons for i in shard["samples"]):
                return False
            self.left_out.update({i: reasons[self.keys[i]] for i in shard["samples"]})
            return True
        try:
            self.inspect(shard)
        except UnusableStates:
            self.store.set_aside(path)
            return False
        return True

    def inspect(self, shard: dict[str, Any]) -> None:
        """Enter an existing shard into `present`; `UnusableStates` when it is not the right one.

        Its header is compared with this lane's convention and samples, its size with the one it
        was written with. Its bytes are compared with their checksums whenever they are read.
        """
        path, c = self.store.path(shard["id"]), self.store.convention
        with Shard(path) as opened:
            if opened.convention.key != c.key:
                raise UnusableStates(
                    f"{path}: a shard of another verifier, of other layers or format"
                )
            held = deque((s["key"], s["tokens"]) for s in opened.samples)
            omitted, size = opened.omitted_bytes(), opened.size
        facts = read_facts(path)
        if facts["bytes"] != size:
            raise UnusableStates(f"{path}: {size} bytes, written as {facts['bytes']}")
        samples, tokens, left_out = [], 0, {}
        for identity in shard["samples"]:
            key = self.keys[identity]
            if held and held[0][0] == key:
                tokens += held.popleft()[1]
                samples.append(identity)
            elif key in facts["left_out"]:
                left_out[identity] = facts["left_out"][key]
            else:
                raise UnusableStates(f"{path}: sample {identity} is not in it")
        if held:
            raise UnusableStates(f"{path}: holds samples that do not belong there")
        self.left_out.update(left_out)
        self.present[shard["id"]] = {
            "samples": samples,
            "tokens": tokens,
            "omitted_bytes": omitted,
            **facts,
        }

    def to_extract(self) -> list[TokenizedSample]:
        return [
            self.rows[i]
            for shard in self.missing
            for i in shard["samples"]
            if self.keys[i] not in self.found
        ]

    def staging_bytes(self) -> int:
        """Room for the states of three of the missing shards, bytes: computed, written, next."""
        sizes = [sum(len(self.rows[i].input_ids) for i in s["samples"]) for s in self.missing]
        return 3 * max(sizes, default=0) * self.store.convention.bytes_per_token()

    def batches(self) -> list[tuple[dict[str, Any], list[TokenizedSample]]]:
        """The missing shards, each with its rows to extract, longest first.

        So no long one is left for the end, when the engine has little else to do beside it.
        """
        found = []
        for shard in self.missing:
            rows = [self.rows[i] for i in shard["samples"] if self.keys[i] not in self.found]
            found.append((shard, sorted(rows, key=lambda r: -len(r.input_ids))))
        return found


# The teacher's word on captured states


def find_mismatched_samples(
    teacher: Teacher, samples: list[tuple[str, torch.Tensor, list[int]]], greedy: bool
) -> dict[str, str]:
    """Samples whose last states do not lead to the tokens that the verifier chose, and why.

    `samples`: id, states [T, ids, hidden], the tokens that followed its last positions. Raises
    `UnusableStates` when so many disagree that the fault is not the samples'.
    """
    if not samples:
        return {}
    last = torch.cat([states[-len(chosen) :, -1] for _, states, chosen in samples])
    tokens = [token for *_, chosen in samples for token in chosen]
    ranks = teacher.ranks(last, torch.tensor(tokens))
    # States that have nothing to do with the token give it any rank; one in a thousand is luck.
    limit = (
        min(100, max(5, len(teacher.head) // 1000))
        if greedy
        else max(1000, len(teacher.head) // 20)
    )
    found = {}
    own_ranks = ranks.split([len(chosen) for *_, chosen in samples])
    for (identity, *_), own in zip(samples, own_ranks, strict=True):
        if (own >= limit).float().mean() > 0.5:
            found[identity] = (
                "lm_head(final_norm(last state)) does not lead to the token that the verifier "
                f"chose: {int(own.max())} tokens come before it"
            )
    fine = [
        own for (identity, *_), own in zip(samples, own_ranks, strict=True) if identity not in found
    ]
    if len(found) >= FEWEST_FOR_A_VERDICT and len(found) > len(samples) / 2:
        judge_ranks(ranks, greedy)  # its words, where it sees it too
        raise UnusableStates(next(iter(found.values())) + f", and so in {len(found)} samples")
    if len(fine) >= FEWEST_FOR_A_VERDICT or sum(map(len, fine)) >= ENOUGH_FOR_A_VERDICT:
        judge_ranks(torch.cat(fine), greedy)
    return found


def writers(most: int) -> concurrent.futures.ThreadPoolExecutor:
    """At most `most` threads that check, pack and write beside an engine; make it before that."""
    cores = os.sched_getaffinity(0)

    def prepare() -> None:
        # vLLM's CPU worker binds the main thread to a core, and threads inherit that.
        os.sched_setaffinity(0, cores)
        # More OpenMP threads than cores, and libgomp lets all of them sleep at every barrier: the
        # engine would be a tenth slower from the first use of torch here on.
        set_num_threads(1)
        thread = threading.get_native_id()
        # What the engine waits for comes before what writes.
        os.setpriority(
            os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 10)
        )

    return concurrent.futures.ThreadPoolExecutor(min(most, len(cores)), initializer=prepare)


class LaneExtractor:
    """Fills the missing shards of a lane; see `fill`."""

    def __init__(
        self,
        work: LaneWork,
        teacher: Callable[[], Teacher],
        progress: Callable[[int, int], None],
        staging_bytes: int,
        min_kept_share: float,
        beat: Callable[[], None],
        enter: Callable[[str], None],
        leases: Leases,
    ):
        self.work, self.progress, self.limit = work, progress, staging_bytes
        self.beat, self.enter, self.leases = beat, enter, leases
        self.adopted = 0
        self.awaited = 0
        wanted = len(work.keys)
        self.may_lose = wanted - math.ceil(min_kept_share * wanted)
        self.min_kept_share = min_kept_share
        self.came: set[str] = set()
        self.tokens = 0
        self.quarantined: dict[str, str] = dict(work.left_out)
        self.tried: set[str] = set()
        self.again: deque[str] = deque()
        self.flying: dict[str, str] = {}
        self.arrived: dict[str, tuple[Path, int]] = {}
        self.loaded: dict[str, tuple[Sample, int]] = {}
        self.vouched: set[str] = set()
        self.shard_of = {i: s for s in work.missing for i in s["samples"]}
        self.empty: list[dict[str, Any]] = []
        self.waiting = {
            s["id"]: {i for i in s["samples"] if work.keys[i] not in work.found}
            for s in work.missing
        }
        self.todo = deque(work.batches())
        self.batch: deque[TokenizedSample] = deque()
        self.staged: dict[str, int] = {}
        self.writing: dict[concurrent.futures.Future[dict[str, str]], dict[str, Any]] = {}
        self.pool = writers(2)
        # Samples of shards too small for a sure verdict of their own, and these shards.
        self.few: list[tuple[str, torch.Tensor, list[int]]] = []
        self.unjudged: list[dict[str, Any]] = []
        self._teacher, self._teacher_lock = teacher, threading.Lock()
        self._head: Teacher | None = None

    # Main thread

    def run(self, start_engine: Callable[[], AbstractContextManager[Any]]) -> None:
        try:
            self.make_shards(start_engine)
            self.judge_few(FEWEST_FOR_A_VERDICT)
        except UnusableStates:
            for shard in self.unjudged:
                self.work.store.set_aside(self.work.store.path(shard["id"]))
            raise
        self.record_empty()

    def make_shards(self, start_engine: Callable[[], AbstractContextManager[Any]]) -> None:
        with self.pool:  # whatever happens, shards whose samples have come are written
            self.count_kept()
            engines = 0
            while self.todo or self.batch or self.again or self.writing:
                if not (self.batch or self.again or self.begin()):
                    self.wait()
                    continue
                engines += 1
                try:
                    with start_engine() as engine:
                        for answer in engine.run(self.requests(engine.max_model_len)):
                            self.take(answer)
                except EngineDied as error:
                    if engines == MAX_ENGINES:
                        raise EngineDied(
                            f"{engines} engines died, the last with {error}; what was finished "
                            "is kept. See the engine's log above"
                        ) from error
                    for identity in list(self.flying.values()):
                        self.fail(identity, f"the engine died with it: {error}")
                    self.flying.clear()

    def requests(self, max_model_len: int) -> Iterator[Request | None]:
        """What the engine is to compute next; None: nothing now.

        A shard is begun when the one before is computed (why: at the top) and its states fit into
        what may be staged (or nothing is being written that would make room). What failed flies
        alone.
        """
        while True:
            self.collect()
            if self.batch:
                row = self.batch.popleft()
                if len(row.input_ids) < max_model_len:
                    yield self.request(row.id, row.id)
                else:
                    self.leave_out(
                        row.id, f"{len(row.input_ids)} tokens; the engine takes {max_model_len - 1}"
                    )
            elif self.flying:
                yield None
            elif self.again:
                identity = self.again.popleft()
                yield self.request(identity, f"{identity}-again")
            elif self.begin():
                continue
            elif self.todo or self.writing:
                self.wait()
            else:
                return

    def begin(self) -> bool:
        """Take up the next shard that has samples to extract and is in nobody else's work."""
        for _ in range(len(self.todo)):
            shard, rows = self.todo[0]
            if len(self.writing) >= MAX_WRITING or (self.writing and not self.fits(rows)):
                return False
            if not self.leases.take(self.work.store.path(shard["id"])):
                self.todo.rotate(-1)
                continue
            self.todo.popleft()
            if self.awaited:
                self.awaited = 0
                self.enter("working")
            if self.work.usable(shard):
                self.adopt(shard)
            elif not rows:
                self.submit(shard)
            else:
                self.batch.extend(rows)
                self.staged |= {r.id: self.size(r) for r in rows}
                return True
        return False

    def adopt(self, shard: dict[str, Any]) -> None:
        """Take in a shard that somebody else made meanwhile."""
        left_out = {i: why for i in shard["samples"] if (why := self.work.left_out.get(i))}
        kept = [i for i in shard["samples"] if i not in left_out]
        self.adopted += sum(self.work.keys[i] not in self.work.found for i in kept)
        self.quarantined |= left_out
        self.leases.release(self.work.store.path(shard["id"]))
        self.count_kept()
        self.progress(len(self.came) + self.adopted, self.tokens)

    def wait(self) -> None:
        """Wait for a writer, or for somebody else's shards when nothing else is left."""
        if self.writing:
            self.collect(wait=True)
        elif self.todo:
            self.record_empty()  # or two lanes would each wait for the other's
            if self.awaited != len(self.todo):
                self.awaited = len(self.todo)
                who = self.leases.holder(self.work.store.path(self.todo[0][0]["id"]))
                print(f"waits for {self.awaited} shards that {who or 'another'} makes", flush=True)
                self.enter("waiting")
            self.beat()
            time.sleep(POLL_SECONDS)

    def record_empty(self) -> None:
        """Say of which shards nothing could be kept, so that nobody tries it again.

        Only when our own work is done: a lane that keeps too few has them all tried again.
        """
        while self.empty:
            shard = self.empty.pop()
            path = self.work.store.path(shard["id"])
            left_out = {self.work.keys[i]: self.quarantined[i] for i in shard["samples"]}
            if not os.path.lexists(path):  # else another run was luckier
                write_nothing_kept(path, left_out)
            self.leases.release(path)

    def fits(self, rows: list[TokenizedSample]) -> bool:
        return sum(self.staged.values()) + sum(map(self.size, rows)) <= self.limit

    def size(self, row: TokenizedSample) -> int:
        return len(row.input_ids) * self.work.store.convention.bytes_per_token()

    def request(self, identity: str, key: str) -> Request:
        self.flying[key] = identity
        return Request(key, self.work.rows[identity].input_ids, 1)

    def take(self, answer: Answer) -> None:
        identity = self.flying.pop(answer.key)
        if isinstance(answer, Failure) or answer.states is None:
            self.fail(identity, getattr(answer, "reason", "the engine gave no states"))
            return
        self.arrived[identity] = (answer.states, answer.tokens[0])
        if identity not in self.came:
            self.came.add(identity)
            self.tokens += len(answer.prompt)
        self.done_with(identity)
        self.progress(len(self.came) + self.adopted, self.tokens)

    def fail(self, identity: str, reason: str) -> None:
        """The first time a sample is put back, to be tried alone; the second time left out."""
        if identity in self.tried:
            self.leave_out(identity, reason)
        else:
            self.tried.add(identity)
            self.again.append(identity)

    def leave_out(self, identity: str, reason: str) -> None:
        self.quarantined[identity] = reason
        self.count_kept()
        self.done_with(identity)

    def count_kept(self) -> None:
        if len(self.quarantined) > self.may_lose:
            raise InputError(too_few(self.work, self.quarantined, self.min_kept_share))

    def done_with(self, identity: str) -> None:
        shard = self.shard_of[identity]
        self.waiting[shard["id"]].discard(identity)
        if not self.waiting[shard["id"]]:
            self.submit(shard)

    def submit(self, shard: dict[str, Any]) -> None:
        self.writing[self.pool.submit(self.write, shard)] = shard

    def collect(self, wait: bool = False) -> None:
        """Take in what the writers finished; `wait` for one of them."""
        if wait:
            concurrent.futures.wait(self.writing, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in [f for f in self.writing if f.done()]:
            shard = self.writing.pop(future)
            wrong = future.result()
            # All of them are awaited before one of them can complete the shard.
            self.waiting[shard["id"]].update(wrong)
            for identity, reason in wrong.items():
                self.fail(identity, reason)
            if wrong:
                continue
            for identity in shard["samples"]:
                self.staged.pop(identity, None)
            if all(identity in self.quarantined for identity in shard["samples"]):
                self.empty.append(shard)
            else:
                self.leases.release(self.work.store.path(shard["id"]))

    # Writer threads

    def write(self, shard: dict[str, Any]) -> dict[str, str]:
        """Check and write a shard whose samples have all come; else say which are wrong, and why.

        Raises `UnusableStates` when all is wrong, which no second try would mend.
        """
        wrong: dict[str, str] = {}
        samples: dict[str, Sample] = {}
        for identity in shard["samples"]:
            if identity in self.quarantined:
                continue
            try:
                samples[identity] = self.load(identity)
            except UnusableStates as error:
                wrong[identity] = str(error)
        wrong |= self.ask_teacher(shard, samples)
        if not wrong and samples:
            left_out = {
                self.work.keys[i]: self.quarantined[i] for i in shard["samples"] if i not in samples
            }
            try:
                found = list(samples.values())
                write_shard(self.work.store, shard["id"], found, left_out, self.beat)
            except UnusableStates:
                wrong = self.find_wrong(samples)
                if not wrong:
                    raise
        self.vouched.difference_update(wrong)
        for identity in wrong or samples:
            self.loaded.pop(identity, None)
        return wrong

    def load(self, identity: str) -> Sample:
        """The sample from where its states are; `UnusableStates` when they are not its own."""
        row, key = self.work.rows[identity], self.work.keys[identity]
        if identity in self.loaded:
            return self.loaded[identity][0]
        if identity in self.arrived:
            path, chosen = self.arrived.pop(identity)
            states, tokens = read_captured(path)
            if tokens.tolist() != row.input_ids:
                raise UnusableStates("the engine saved the states of other tokens")
            # Shapes first: the teacher looks at the last state.
            check_states(states[-1:], tokens[-1:], self.work.store.convention)
            self.loaded[identity] = (Sample(identity, tokens, states, row.loss_mask), chosen)
            return self.loaded[identity][0]
        path, number = self.work.found[key]
        try:
            with Shard(path) as other:
                there = [entry["key"] for entry in other.samples[number : number + 1]] == [key]
                sample = other.read(number) if there else None
        except UnusableStates:
            self.work.store.set_aside(path)
            raise
        if sample is None:
            raise UnusableStates(
                f"{path} was made anew meanwhile, without this sample at its place"
            )
        return replace(sample, id=identity)

    def ask_teacher(self, shard: dict[str, Any], samples: dict[str, Sample]) -> dict[str, str]:
        fresh = [
            (i, samples[i].states[-1:], [self.loaded[i][1]])
            for i in samples
            if i in self.loaded and i not in self.vouched
        ]
        if not fresh:
            return {}
        with self._teacher_lock:
            if self._head is None:
                self._head = self._teacher()
            try:
                wrong = find_mismatched_samples(self._head, fresh, greedy=True)
            except UnusableStates as error:
                raise self.refuse([shard], fresh, error) from None
            fine = [sample for sample in fresh if sample[0] not in wrong]
            if len(fine) < ENOUGH_FOR_A_VERDICT:
                # Copied, or the whole samples would stay in memory.
                self.few += [(i, last.clone(), chosen) for i, last, chosen in fine]
                self.unjudged.append(shard)
                self.judge_few(ENOUGH_FOR_A_VERDICT)
        self.vouched.update(i for i, *_ in fine)
        return wrong

    def judge_few(self, least: int) -> None:
        """Judge the samples of small shards together, once there are so many."""
        if len(self.few) < least:
            return
        last = torch.cat([states[-1:, -1] for _, states, _ in self.few])
        chosen = torch.tensor([token for *_, (token,) in self.few])
        try:
            judge_ranks(self._head.ranks(last, chosen), greedy=True)
        except UnusableStates as error:
            raise self.refuse(self.unjudged, self.few, error) from None
        self.few, self.unjudged = [], []

    def refuse(
        self,
        shards: list[dict[str, Any]],
        samples: list[tuple[str, torch.Tensor, list[int]]],
        error: UnusableStates,
    ) -> UnusableStates:
        """The error to raise when the states are wrong throughout."""
        names = ", ".join(i for i, *_ in samples[:3])
        return UnusableStates(
            f"{error}. So in shard {', '.join(s['id'] for s in shards[:3])}, samples {names}, "
            "...; nothing of it was kept. Check hidden_states.layer_ids and that the verifier's "
            "folder is unchanged since its fingerprint was made"
        )

    def find_wrong(self, samples: dict[str, Sample]) -> dict[str, str]:
        """Which samples the store refuses: by themselves, or as twins of different tokens."""
        wrong: dict[str, str] = {}
        twins: dict[str, str] = {}
        c = self.work.store.convention
        for identity, sample in samples.items():
            twin = twins.setdefault(checksum(sample.states), identity)
            if self.work.keys[twin] != self.work.keys[identity]:
                wrong[twin] = f"has the states of {identity}"
                wrong[identity] = f"has the states of {twin}"
            try:
                mask = sample.loss_mask if c.last_state == "supervised" else None
                check_states(sample.states, sample.tokens, c, mask)
            except UnusableStates as error:
                wrong[identity] = str(error)
        return wrong


def fill(
    work: LaneWork,
    start_engine: Callable[[], AbstractContextManager[Any]],
    teacher: Callable[[], Teacher],
    progress: Callable[[int, int], None],
    *,
    staging_bytes: int,
    min_kept_share: float,
    beat: Callable[[], None] = lambda: None,
    enter: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Extract what is missing and write the shards; return counts and the quarantined samples.

    The engine is started only when a sample has to be extracted. `progress(samples, tokens)`.
    `staging_bytes`: states that may wait for their shard at a time. `beat` is called for each
    sample that was written, by the threads that write: the engine may wait for them, and while
    shards are waited for that another run makes; `enter` is told so (`waiting`). Raises
    `InputError` as soon as fewer than `min_kept_share` of the lane's samples can be kept,
    `UnusableStates` when what the engine gives is wrong throughout, `EngineDied`.
    """
    copied = sum(work.keys[i] in work.found for s in work.missing for i in s["samples"])
    with Leases() as leases:
        filler = LaneExtractor(
            work, teacher, progress, staging_bytes, min_kept_share, beat, enter, leases
        )
        filler.run(start_engine)
    return {
        "extracted_samples": len(filler.came),
        "extracted_tokens": filler.tokens,
        "adopted_samples": filler.adopted,
        "copied_samples": copied,
        "quarantined": filler.quarantined,
    }


def too_few(work: LaneWork, quarantined: dict[str, str], min_kept_share: float) -> str:
    shown = "; ".join(f"{i}: {reason}" for i, reason in list(quarantined.items())[:5])
    return (
        f"{len(quarantined)} of {len(work.keys)} samples could not be extracted, which leaves "
        f"fewer than hidden_states.min_kept_share = {min_kept_share}. {shown}. What was left out "
        f"of a finished shard is not tried again by itself; docs/runbook.md (Samples that were "
        "left out) says how it is"
    )


def describe_lane(
    work: LaneWork,
    counts: dict[str, Any],
    min_kept_share: float,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The lane's manifest: its shards with sizes and checksums, and what was left out.

    `beat` is called for each shard that was read: of terabytes that takes a while.
    Raises `InputError` when a smaller share of the samples than `min_kept_share` is there, or
    when a shard has gone meanwhile.
    """
    entries, kept, omitted = [], 0, 0
    for shard in work.shards:
        path = work.store.path(shard["id"])
        known = shard["id"] in work.present and path.is_file()
        if not known and not work.usable(shard):
            raise InputError(
                f"{path}: it was there a moment ago and is no whole shard now; who else works on "
                "this store? Run again: it is made anew"
            )
        if shard["id"] not in work.present:
            beat()
            continue
        facts = work.present[shard["id"]]
        kept += len(facts["samples"])
        omitted += facts["omitted_bytes"]
        entries.append(
            {
                "id": shard["id"],
                "file": path.name,
                "split": shard["split"],
                "samples": facts["samples"],
                "tokens": facts["tokens"],
                "bytes": facts["bytes"],
                "checksum": facts["checksum"],
            }
        )
        beat()
    if kept < min_kept_share * len(work.keys):
        raise InputError(too_few(work, work.left_out, min_kept_share))
    c = work.store.convention
    raw = sum(e["tokens"] for e in entries) * c.bytes_per_token()
    return {
        "convention": {
            **c.as_json(),
            "last_layer": "before the final norm",
            "last_state": c.last_state,
        },
        "shards": entries,
        "samples": kept,
        "tokens": sum(e["tokens"] for e in entries),
        "raw_bytes": raw,
        "omitted_bytes": omitted,
        "bytes": sum(e["bytes"] for e in entries),
        **counts,
        "quarantined": work.left_out,
    }
