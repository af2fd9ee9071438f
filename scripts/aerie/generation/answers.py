"""Answers of the verifier: asked turn by turn, kept by content, with their hidden states.

An answer is kept under a hash of its conversation's user turns and of everything that determines
the reply, in small files written whole; a killed job loses at most the last few.
"""

import concurrent.futures
import contextlib
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.chat.encoding import Unverified
from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError, UnusableStates
from aerie.common.files import digest, read_json_lines, write_json_lines
from aerie.common.leases import POLL_SECONDS, Leases
from aerie.common.versions import RESPONSES_VERSION
from aerie.engine.captured import read_captured
from aerie.engine.endpoints import Endpoints
from aerie.engine.in_process import Engine
from aerie.engine.protocol import Answer, Failure, Refused, Request
from aerie.engine.servers import EndpointError
from aerie.samples.tokenize import (
    Dropped,
    TokenizedSample,
    describe_shard,
    group_by_shard,
    rows_of_answer,
)
from aerie.states.room import check_room
from aerie.states.shard import Sample
from aerie.states.store import Store, write_shard
from aerie.states.teacher import Teacher, find_mismatched_samples
from aerie.states.writers import writers

FLUSH_ANSWERS = 32
FLUSH_SECONDS = 20.0
GROUP = 64
"""Mean number of records that a run answers under one lease, where it makes no shards of them."""
TEACHER_TOKENS = 8
"""Generated tokens of a sample that the teacher compares with its captured states."""


@dataclass(frozen=True)
class Sampling:
    """How the verifier answers; `max_tokens` an answer, `max_length` the whole sample, tokens.

    `first_turn_only`: what follows the first user turn is left out. `model`: name of the model
    at the endpoints that answer, None for the job's own engine.
    """

    temperature: float
    top_p: float
    max_tokens: int
    max_length: int
    seed: int
    first_turn_only: bool = False
    model: str | None = None

    def key(self, fingerprint: str) -> str:
        """Name of the folder with the answers of this verifier under these settings."""
        relevant = {**vars(self)}
        if self.temperature == 0:
            del relevant["seed"], relevant["top_p"]
        # Left out where they say nothing, so that earlier answers keep their place.
        for name in ("first_turn_only", "model"):
            if not relevant[name]:
                del relevant[name]
        return digest(RESPONSES_VERSION, fingerprint, relevant)[:16]


class AnswerStore:
    """Answers by record id, in files of JSON lines that are whole or absent."""

    def __init__(self, root: Path, key: str):
        self.folder = Path(root) / "answers" / key
        self._known: set[Path] = set()
        self._fresh: list[dict[str, Any]] = []
        self._flushed = time.monotonic()

    def load(self, wanted: set[str] | None = None) -> dict[str, dict[str, Any]]:
        """Answers by record id. A damaged file is moved aside: its answers are made again.

        Those marked `again` give way to others for the same record.
        """
        return self._read(sorted(self.folder.glob("*.jsonl.zst")), wanted)

    def load_new(self) -> dict[str, dict[str, Any]]:
        """All answers in files that came since, and that we did not write."""
        return self._read(sorted(set(self.folder.glob("*.jsonl.zst")) - self._known), None)

    def _read(self, files: list[Path], wanted: set[str] | None) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for path in files:
            self._known.add(path)
            try:
                answers = {answer["id"]: answer for answer in read_json_lines(path)}
            except (InputError, KeyError, TypeError):
                with contextlib.suppress(FileNotFoundError):  # another run was first
                    path.rename(path.with_suffix(".damaged"))
                continue
            for identity, answer in answers.items():
                if wanted is not None and identity not in wanted:
                    continue
                if identity not in found or not answer.get("again"):
                    found[identity] = answer
        return found

    def add(self, answer: dict[str, Any]) -> None:
        self._fresh.append(answer)
        late = time.monotonic() - self._flushed > FLUSH_SECONDS
        if late or len(self._fresh) >= FLUSH_ANSWERS:
            self.flush()

    def flush(self) -> None:
        if self._fresh:
            path = self.folder / f"{digest([a['id'] for a in self._fresh])}.jsonl.zst"
            write_json_lines(path, self._fresh)
            self._known.add(path)
        self._fresh = []
        self._flushed = time.monotonic()


class Conversation:
    """One record on its way: its user turns are put one by one, with the answers between.

    `samples`: token rows so far, each `ids` and `spans` ([start, end) of the answers in it). A
    template that renders earlier turns differently later starts a new one.
    """

    def __init__(self, record: dict[str, Any], template: ChatTemplate, sampling: Sampling):
        self.record, self.template, self.sampling = record, template, sampling
        self.pending = [m for m in record["messages"] if m["role"] != "assistant"]
        if sampling.first_turn_only:
            turns = [i for i, m in enumerate(self.pending) if m["role"] == "user"]
            self.pending = self.pending[: turns[0] + 1] if turns else []
        self.messages: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.finishes: list[str] = []
        self.dropped: str | None = None
        self.ended: str | None = None
        self.again = False

    def next_request(self) -> Request | None:
        """The next turn to answer, None when the conversation has ended."""
        if not any(m["role"] == "user" for m in self.pending):
            return None
        while self.pending:
            message = self.pending.pop(0)
            self.messages.append(message)
            if message["role"] == "user":
                break
        tools = self.record.get("tools")
        try:
            prompt = None
            if self.samples:
                ids = self.samples[-1]["ids"]
                prompt = self.template.next_prompt_ids(self.messages, ids, tools)
            going_on = prompt is not None
            if prompt is None:
                prompt = self.template.prompt_ids(self.messages, tools)
        except Unverified as error:
            return self._end(f"the chat template refuses it: {error}")
        room = min(self.sampling.max_tokens, self.sampling.max_length - len(prompt))
        if room < 2:
            return self._end("prompt fills the window")
        if not going_on:
            self.samples.append({"ids": [], "spans": []})
        return Request(f"{self.record['id']}:{len(self.finishes)}", prompt, room)

    def take(self, answer: Answer) -> None:
        """Add the engine's answer to the request last given."""
        if isinstance(answer, Failure) and not answer.tokens:
            if not self.samples[-1]["spans"]:
                self.samples.pop()
            self.again = isinstance(answer, Refused) and answer.again
            return self._end(answer.reason)
        ids = answer.prompt + answer.tokens
        self.samples[-1]["spans"].append([len(answer.prompt), len(ids)])
        self.samples[-1]["ids"] = ids
        self.finishes.append(answer.finish)
        text = self.template.decode(answer.tokens)
        self.texts.append(text)
        self.messages.append({"role": "assistant", "content": text})

    def _end(self, reason: str) -> None:
        self.pending = []
        self.ended = reason
        if not self.finishes:
            self.dropped = reason

    def row(self) -> dict[str, Any]:
        """What is kept of it, see `AnswerStore`.

        `dropped`: why there is no answer at all. `ended`: why only the first turns have one.
        `again`: the reason may have gone when the next run asks again.
        """
        again = {"again": True} if self.again else {}
        if self.dropped:
            return {"id": self.record["id"], "dropped": self.dropped, **again}
        return {
            **({"ended": self.ended} if self.ended else {}),
            **again,
            "id": self.record["id"],
            "samples": self.samples,
            "finishes": self.finishes,
            "texts": self.texts,
        }


def _never() -> bool:
    return False


def converse(
    engine: Engine | Endpoints,
    records: Iterable[dict[str, Any] | None],
    template: ChatTemplate,
    sampling: Sampling,
    hold: Callable[[], bool] = _never,
) -> Iterator[tuple[Conversation, Answer | None]]:
    """Hold all conversations with the engine at once; yield each when it has ended.

    With it comes the answer to its last turn (None when nothing could be asked). `records` is drawn
    from lazily; a None among them says that there is none now, though others are under way. While
    `hold()` no conversation is begun beside those that are under way.
    """
    waiting = iter(records)
    ready: deque[Request] = deque()
    talking: dict[str, Conversation] = {}
    refused: list[Conversation] = []

    def requests() -> Iterator[Request | None]:
        while True:
            while not ready and not (talking and hold()):
                record = next(waiting, None)
                if record is None:
                    break
                conversation = Conversation(record, template, sampling)
                request = conversation.next_request()
                if request is None:
                    refused.append(conversation)
                else:
                    talking[conversation.record["id"]] = conversation
                    ready.append(request)
            yield ready.popleft() if ready else None

    answers = engine.run(
        requests(),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=lambda key: _seed(sampling.seed, key),
    )
    for answer in answers:
        while refused:
            yield refused.pop(), None
        conversation = talking[answer.key.split(":")[0]]
        conversation.take(answer)
        request = conversation.next_request()
        if request is not None:
            if answer.states is not None:
                answer.states.unlink()  # the last turn's states hold these too
            ready.append(request)
            continue
        del talking[conversation.record["id"]]
        yield conversation, answer
    while refused:
        yield refused.pop(), None


def _seed(seed: int, key: str) -> int:
    """A seed of its own for each request, whatever it is batched with."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=4).digest())


class Capture:
    """Makes shards of the states that arrive with the answers, as soon as a group is complete.

    Left to the extraction stage: a group with an answer that came without states (kept from an
    earlier run), one whose states fail a check, and one that is begun while `staging_bytes` of
    states wait for others already. `max_gib`: see `room.check_room`; what does not fit on
    the disk any more stops the job. `beat`: called for each sample written, by the thread that
    writes. `written`: called by it with the number of each group that it is done with.
    """

    def __init__(
        self,
        store: Store,
        teacher: Teacher,
        splits: dict[str, list[dict[str, Any]]],
        mean: int,
        limits: dict[str, int],
        greedy: bool,
        staging_bytes: int,
        max_gib: float | None = None,
        beat: Callable[[], None] = lambda: None,
    ):
        self.store, self.teacher, self.limits, self.greedy = store, teacher, limits, greedy
        self.staging_bytes, self.max_gib, self.beat = staging_bytes, max_gib, beat
        self.groups: list[tuple[str, list[dict[str, Any]]]] = []
        self.group_of: dict[str, int] = {}
        for split, records in splits.items():
            for positions in group_by_shard(records, mean):
                for position in positions:
                    self.group_of[records[position]["id"]] = len(self.groups)
                self.groups.append((split, [records[p] for p in positions]))
        self.missing = [len(records) for _, records in self.groups]
        self.left = [False] * len(self.groups)
        self.answers: dict[str, dict[str, Any]] = {}
        self.states: dict[str, Path] = {}
        self.staged: dict[str, int] = {}
        self.shards = 0
        self.tokens = 0
        self.failed: list[str] = []
        self.written: Callable[[int], None] = lambda _: None
        self._pool = writers(1)
        self._writing: list[concurrent.futures.Future[None]] = []

    def take(self, answer: dict[str, Any], states: Path | None) -> None:
        identity = answer["id"]
        group = self.group_of[identity]
        self.answers[identity] = answer
        if states is None and not answer.get("dropped"):
            self._leave(group)
        elif states is not None:
            size = states.stat().st_size
            # Conversations under way still end while new ones wait, and so add to what is staged.
            while self._bytes() + size > self.staging_bytes and self._busy():
                concurrent.futures.wait(
                    self._writing, return_when=concurrent.futures.FIRST_COMPLETED
                )
            if self._bytes() + size > self.staging_bytes:
                self._leave(group)
            if self.left[group]:
                states.unlink()
            else:
                self.states[identity], self.staged[identity] = states, size
        self.missing[group] -= 1
        if self.missing[group] == 0:
            self._writing.append(self._pool.submit(self._write, group))
        self._busy()

    def full(self) -> bool:
        """Whether new conversations should wait until a shard is written."""
        return self._bytes() > self.staging_bytes // 2 and self._busy()

    def _bytes(self) -> int:
        return sum(self.staged.copy().values())

    def _busy(self) -> bool:
        for future in [f for f in self._writing if f.done()]:
            self._writing.remove(future)
            future.result()
        return bool(self._writing)

    def _leave(self, group: int) -> None:
        """Give the states of a group up: it is extracted later."""
        self.left[group] = True
        self._remove(group)

    def _remove(self, group: int) -> None:
        for record in self.groups[group][1]:
            if path := self.states.pop(record["id"], None):
                path.unlink(missing_ok=True)
            # Only now is there room: the other thread takes it at once.
            self.staged.pop(record["id"], None)

    def _write(self, group: int) -> None:
        split, records = self.groups[group]
        rows: list[tuple[TokenizedSample, Path | None]] = []
        try:
            for record in records:
                answer = self.answers.pop(record["id"])
                states = self.states.get(record["id"])
                try:
                    of_answer = rows_of_answer(record, split, answer, self.limits)
                except Dropped:
                    continue
                # Only the last sample's states were captured.
                last = f"{record['id']}-{len(answer['samples']) - 1}"
                whole = len(answer["samples"]) == 1
                for row in of_answer:
                    rows.append((row, states if whole or row.id == last else None))
            if not rows or any(states is None for _, states in rows):
                return
            last_state = self.store.convention.last_state
            shard = describe_shard(split, [row for row, _ in rows], last_state)
            if self.store.has(shard["id"]):
                return
            check_room(self.store, shard["tokens"], self.max_gib)
            samples, chosen = [], []
            for row, path in rows:
                states, tokens = read_captured(path)
                if tokens.tolist() != row.input_ids:
                    raise UnusableStates(
                        f"sample {row.id}: captured tokens are not those of the row"
                    )
                samples.append(Sample(row.id, tokens, states, row.loss_mask))
                following = [*row.input_ids[row.last_turn :], row.next_token]
                chosen.append((row.id, states, following[-TEACHER_TOKENS:]))
            for identity, reason in find_mismatched_samples(
                self.teacher, chosen, self.greedy
            ).items():
                raise UnusableStates(f"sample {identity}: {reason}")
            write_shard(self.store, shard["id"], samples, {}, self.beat)
            self.shards += 1
            self.tokens += shard["tokens"]
        except UnusableStates as error:
            self.failed.append(str(error))
        finally:
            self._remove(group)
            self.written(group)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._busy()


class Groups:
    """Records to answer, group by group, with a lease on each: what another run answers now comes
    last, and is then found in the store, or answered when the other is gone.

    Iterate over it as long as `left` says so; a None says that there is nothing now. `adopt(row)`
    is called with each answer that another run gave meanwhile; `idle(words)` again and again
    while there is nothing to do but wait for another run.
    """

    def __init__(
        self,
        groups: list[list[dict[str, Any]]],
        known: dict[str, dict[str, Any]],
        answers: AnswerStore,
        leases: Leases,
        adopt: Callable[[dict[str, Any]], None],
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
        self._others: dict[str, dict[str, Any]] = {}
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
                if not self.open.total():
                    who = self.leases.holder(self.paths[self.todo[0][0]]) or "another"
                    self.idle(f"waits for {len(self.todo)} groups of records that {who} answers")
                    time.sleep(POLL_SECONDS)
                else:
                    yield None

    def _begin(self, group: int, missing: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        self._others |= self.answers.load_new()
        wanted = []
        self.open[group] = len(missing)
        for record in missing:
            found = self._others.pop(record["id"], None)
            if found is None or found.get("again"):
                wanted.append(record)
            else:
                self.adopt(found)
        yield from wanted

    def ended(self, identity: str) -> int | None:
        """Say that a record has its answer; the number of its group when that was the last one."""
        group = self.group_of[identity]
        self.open[group] -= 1
        return None if self.open[group] else group

    def release(self, group: int) -> None:
        self.leases.release(self.paths[group])


def generate(
    engine: Engine | Endpoints,
    splits: dict[str, list[dict[str, Any]]],
    template: ChatTemplate,
    sampling: Sampling,
    answers: AnswerStore,
    known: dict[str, dict[str, Any]],
    capture: Capture | None,
    progress: Callable[[int, int], None],
    idle: Callable[[str], None] = lambda _: None,
) -> int:
    """Answer the records of all splits that are not `known`; keep each answer as it comes.

    Returns how many answers came from another run meanwhile. `progress(records, tokens)`: called
    with what is done so far; `idle(words)` while there is nothing to do but wait for another run
    that answers the same records. Raises `EndpointError` when no endpoint works any more, with the
    number of answers that were kept.
    """
    if capture is not None:
        groups = [records for _, records in capture.groups]
    else:
        groups = [
            [records[p] for p in positions]
            for records in splits.values()
            for positions in group_by_shard(records, GROUP)
        ]
    done = tokens = asked = 0

    def end(row: dict[str, Any], states: Path | None) -> None:
        nonlocal done
        known[row["id"]] = row
        done += 1
        whole = work.ended(row["id"])
        if whole is not None:
            answers.flush()
        if capture is not None:
            capture.take(row, states)
        elif whole is not None:
            work.release(whole)
        progress(done, tokens)

    with Leases() as leases:
        work = Groups(groups, known, answers, leases, lambda row: end(row, None), idle)
        if capture is not None:
            capture.written = work.release
            for identity in list(known):
                if identity in capture.group_of:
                    capture.take(known[identity], None)
        try:
            while work.left():
                for conversation, answer in converse(
                    engine, work, template, sampling, capture.full if capture else _never
                ):
                    row = conversation.row()
                    asked += 1
                    answers.add(row)
                    if capture is not None and isinstance(answer, Failure) and answer.tokens:
                        capture.failed.append(answer.reason)
                    tokens += sum(e - s for x in row.get("samples", []) for s, e in x["spans"])
                    end(row, answer.states if answer else None)
        except EndpointError as error:
            wanted = sum(map(len, splits.values()))
            raise EndpointError(
                f"{error}{len(known)} of {wanted} records have their answers, and these are kept; "
                "see that the endpoints run, then run again: it goes on from there"
            ) from None
        finally:
            answers.flush()
        if capture is not None:
            capture.close()
    return done - asked


def describe(known: dict[str, dict[str, Any]], wanted: list[str]) -> dict[str, Any]:
    """Counts of the answers to these records, for the manifest."""
    rows = [known[i] for i in wanted]
    finishes = [f for r in rows for f in r.get("finishes", [])]
    lengths = [e - s for r in rows for x in r.get("samples", []) for s, e in x["spans"]]
    return {
        "records": len(rows),
        "answers": len(finishes),
        "truncated": sum(f == "length" for f in finishes),
        "generated_tokens": sum(lengths),
        "not_answered": sum("dropped" in r for r in rows),
        "ended_early": sum("ended" in r for r in rows),
    }
