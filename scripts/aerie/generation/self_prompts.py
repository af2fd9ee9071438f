"""The stage `write_prompts`: the verifier writes user turns, sampled from its chat template.

The conversation is cut right after the user's header and the verifier continues it, as Magpie
(arXiv 2406.08464) does. Every attempt has a number and a seed of its own, is kept in the store, and
is judged in the order of the numbers. So the result does not depend on what was computed in
parallel, and a larger `number` keeps the prompts of a smaller one.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from aerie.chat.template import ChatTemplate, UserTurn
from aerie.common.errors import InputError
from aerie.common.files import digest, write_json_lines
from aerie.common.progress import JobProgress
from aerie.common.records import Record
from aerie.common.versions import SELF_PROMPTS_VERSION
from aerie.config import Config, SelfPrompts
from aerie.engine.in_process import InProcessEngine
from aerie.engine.protocol import Request, VerifierEngine
from aerie.generation.judging import Judge, Verdict, text_signature
from aerie.generation.record_files import RecordFiles
from aerie.generation.self_prompts_report import DroppedAttempt, SelfPromptsReport
from aerie.verifier.fingerprint import Fingerprint

MAX_ATTEMPTS = 5.0
"""Attempts for each wanted prompt; the stage fails when they do not suffice."""
WAVE = 64
"""Attempts asked for at a time, at least."""
SPARE = 1.1
"""How many times the attempts that the share kept so far calls for are asked for."""
EXAMPLES = 3
"""Attempts shown for each reason."""
EXAMPLE_CHARACTERS = 300
"""Longer texts of examples are cut, characters."""


class Attempt(Record):
    """What the verifier wrote in one attempt."""

    id: int
    """Number of the attempt."""
    ids: list[int]
    """The tokens written, with the one that ended the turn if there is one."""


class AttemptStore(RecordFiles[Attempt]):
    """Attempts by number, under one `attempts_key`."""

    def __init__(self, root: Path, key: str):
        super().__init__(root / "self_prompts" / key, Attempt)


def attempts_key(settings: SelfPrompts, fingerprint: str) -> str:
    """Name of the folder with this verifier's attempts; the filters are not part of it."""
    sampling = {n: getattr(settings, n) for n in ("temperature", "top_p", "max_tokens", "seed")}
    return digest(SELF_PROMPTS_VERSION, fingerprint, sampling)[:16]


def attempt_seed(seed: int, attempt: int) -> int:
    """The seed of one attempt, 0 to 2^32 - 1."""
    return int(digest("self prompt", seed, attempt, size=4), 16)


@dataclass
class Written:
    """The attempts up to the one that gave the last prompt; `asked`: how many this job made."""

    verdicts: list[Verdict]
    asked: int = 0

    @property
    def prompts(self) -> list[str]:
        return [verdict.text for verdict in self.verdicts if not verdict.reason]

    @property
    def dropped(self) -> dict[str, int]:
        """Reason → attempts, the most frequent first."""
        reasons = Counter(verdict.reason for verdict in self.verdicts if verdict.reason)
        return dict(reasons.most_common())

    @property
    def examples(self) -> dict[str, list[DroppedAttempt]]:
        examples: dict[str, list[DroppedAttempt]] = {}
        for attempt, verdict in enumerate(self.verdicts):
            shown = examples.setdefault(verdict.reason, []) if verdict.reason else None
            if shown is not None and len(shown) < EXAMPLES:
                text = verdict.text[:EXAMPLE_CHARACTERS]
                shown.append(DroppedAttempt(attempt=attempt, text=text, detail=verdict.detail))
        return examples


def write_self_prompts(
    verifier: Fingerprint,
    settings: Config,
    store: Path,
    output: Path,
    report: Path,
    progress_log: Path | None = None,
) -> None:
    """Write the prompts (JSON lines, `prompt`) to `output` and a `SelfPromptsReport` to `report`.

    `settings`: the sections self_prompts, engine and
    verifier are used.
    """
    wanted = settings.self_prompts
    model, trust = verifier.folder, settings.verifier.trust_remote_code
    template = ChatTemplate.load(model, trust)
    attempts = AttemptStore(store, attempts_key(wanted, verifier.fingerprint))
    start = time.monotonic()

    def start_engine(turn: UserTurn) -> VerifierEngine:
        return InProcessEngine(
            model,
            settings.engine,
            max_model_len=len(turn.header) + wanted.max_tokens,
            trust_remote_code=trust,
            seed=wanted.seed,
            progress=progress,
        )

    with JobProgress("write_prompts", wanted.number, "prompts", progress_log) as progress:
        written = write_prompts(
            start_engine,
            template,
            wanted,
            attempts,
            lambda kept, asked: progress.update(kept, f"{asked} attempts", attempts=asked),
        )
    write_json_lines(output, ({"prompt": prompt} for prompt in written.prompts))
    SelfPromptsReport(
        key=attempts.folder.name,
        verifier=verifier.fingerprint,
        settings=wanted.model_dump(),
        attempted=len(written.verdicts),
        kept=len(written.prompts),
        dropped=written.dropped,
        tokens=sum(verdict.tokens for verdict in written.verdicts if not verdict.reason),
        asked=written.asked,
        examples=written.examples,
        seconds=round(time.monotonic() - start, 1),
    ).write(report)


def write_prompts(
    start_engine: Callable[[UserTurn], contextlib.AbstractContextManager[VerifierEngine]],
    template: ChatTemplate,
    settings: SelfPrompts,
    store: AttemptStore,
    progress: Callable[[int, int], None],
) -> Written:
    """Let the verifier write until `settings.number` prompts are kept.

    `start_engine` is called at most once, when an attempt is missing in `store`. `progress` is
    called with about how many prompts are kept and how many attempts were made. Raises `InputError`
    with the counts when `MAX_ATTEMPTS` attempts a prompt do not suffice; the attempts stay in the
    store.
    """
    turn = template.user_turn()
    judge = Judge(template, turn, settings.min_letter_share)
    text_signature("a missing package is to be reported before the engine starts")
    limit = math.floor(settings.number * MAX_ATTEMPTS)
    attempts = {number: attempt.ids for number, attempt in store.load(range(limit)).items()}
    asked = 0
    with contextlib.ExitStack() as stack:
        engine = None
        while True:
            end = next((i for i in range(limit) if i not in attempts), limit)
            found = _until(judge.judge_all(attempts[i] for i in range(end)), settings.number)
            kept = len(found.prompts)
            if kept == settings.number or end == limit:
                break
            wave = range(end, min(limit, end + _wave(settings, kept, end)))
            missing = [attempt for attempt in wave if attempt not in attempts]
            engine = engine or stack.enter_context(start_engine(turn))
            for attempt, ids in _attempt(engine, turn, settings, missing, store):
                attempts[attempt] = ids
                asked += 1
                kept += not judge.judge(ids).reason
                progress(min(kept, settings.number - 1), asked)
    found.asked = asked
    if kept < settings.number:
        raise InputError(_too_few(found, settings))
    progress(kept, asked)
    return found


def _wave(settings: SelfPrompts, kept: int, made: int) -> int:
    """How many attempts to ask for next, by the share kept so far."""
    share = max(kept / made if made else 1.0, 1 / MAX_ATTEMPTS)
    return max(WAVE, math.ceil(SPARE * (settings.number - kept) / share))


def _attempt(
    engine: VerifierEngine,
    turn: UserTurn,
    settings: SelfPrompts,
    wanted: list[int],
    store: AttemptStore,
) -> Iterable[tuple[int, list[int]]]:
    """Make these attempts and keep them; yields number and tokens as they finish."""
    ends = tuple(sorted(turn.end_ids))
    answers = engine.run(
        (Request(str(i), turn.header, settings.max_tokens, ends) for i in wanted),
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=lambda key: attempt_seed(settings.seed, int(key)),
    )
    try:
        for answer in answers:
            store.add(Attempt(id=int(answer.key), ids=answer.tokens))
            yield int(answer.key), answer.tokens
    finally:
        store.flush()


def _until(verdicts: list[Verdict], number: int) -> Written:
    """The verdicts up to the one that keeps the last of `number` prompts."""
    kept = 0
    for position, verdict in enumerate(verdicts, 1):
        kept += not verdict.reason
        if kept == number:
            return Written(verdicts[:position])
    return Written(verdicts)


def _too_few(found: Written, settings: SelfPrompts) -> str:
    examples = found.examples
    rows = [
        f"\n  {reason}: {count:,}, such as {examples[reason][0].text[:60]!r}"
        f" ({examples[reason][0].detail})"
        for reason, count in found.dropped.items()
    ]
    return (
        f"the verifier wrote {len(found.prompts):,} usable prompts in {len(found.verdicts):,}"
        f" attempts, but self_prompts.number is {settings.number:,}. Lower it; what was written is"
        " kept and used. Dropped:" + "".join(rows)
    )
