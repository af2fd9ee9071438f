"""Prompts that the verifier writes itself: the user's turn, sampled from its own chat template.

The conversation is cut right after the user's header and the verifier goes on (the Magpie way,
arXiv 2406.08464). Every attempt has a number and a seed of its own, is kept by content, and is
judged in the order of the numbers: the result does not depend on what was computed side by side,
and a larger `number` keeps the prompts of a smaller one.
"""

import contextlib
import math
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aerie.chat.template import ChatTemplate, UserTurn
from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.versions import SELF_PROMPTS_VERSION
from aerie.config import SelfPrompts
from aerie.corpus.cleaning import near_duplicates, signature, words_of
from aerie.engine.in_process import Engine
from aerie.engine.protocol import Request
from aerie.generation.answers import AnswerStore

WAVE = 64
"""Attempts asked for at a time, at least."""
SPARE = 1.1
"""So many times the attempts that the share kept so far calls for are asked for."""
EXAMPLES = 3
"""Attempts shown for each reason."""
EXAMPLE_CHARACTERS = 300
"""Longer texts of examples are cut, characters."""
NOT_TEXT = {"Cc", "Cn", "Co", "Cs"}
"""Unicode categories of characters that no text holds, white space aside."""


def attempts_key(settings: SelfPrompts, fingerprint: str) -> str:
    """Name of the folder with this verifier's attempts; the filters are not part of it."""
    sampling = {n: getattr(settings, n) for n in ("temperature", "top_p", "max_tokens", "seed")}
    return digest(SELF_PROMPTS_VERSION, fingerprint, sampling)[:16]


def attempt_seed(seed: int, attempt: int) -> int:
    """The seed of one attempt, 0 to 2^32 - 1."""
    return int(digest("self prompt", seed, attempt, size=4), 16)


class AttemptStore(AnswerStore):
    """Attempts by number, `id`, with the tokens written, `ids`, in small files that are whole."""

    def __init__(self, root: Path, key: str):
        super().__init__(root, key)
        self.folder = Path(root) / "self_prompts" / key


@dataclass
class Verdict:
    """What became of an attempt: its text, length in tokens, why it was dropped ("": kept)."""

    text: str
    tokens: int
    reason: str = ""
    detail: str = ""


def letter_share(text: str) -> float:
    """Share of ASCII letters among the characters that are not white space, 0 to 1."""
    characters = "".join(text.split())
    letters = sum(c in string.ascii_letters for c in characters)
    return letters / len(characters) if characters else 0.0


def repeated_share(text: str) -> float:
    """Share of the lines, or of the runs of three words if larger, that were there before."""
    words = words_of(text)
    runs = list(zip(words, words[1:], words[2:], strict=False))
    lines = [line.strip() for line in text.splitlines() if words_of(line)]
    return max(1 - len(set(parts)) / len(parts) if parts else 0.0 for parts in (runs, lines))


class Judge:
    """Tells what is kept of the attempts, by the filters of `settings`."""

    def __init__(self, template: ChatTemplate, turn: UserTurn, settings: SelfPrompts):
        self.template, self.turn, self.settings = template, turn, settings
        self.controls = template.control_ids

    def alone(self, ids: Sequence[int]) -> Verdict:
        """The verdict on one attempt, `ids` as generated, without regard to the others."""
        settings = self.settings
        end = next((i for i, token in enumerate(ids) if token in self.turn.end_ids), len(ids))
        text = self.template.decode(list(ids[:end])).strip()
        verdict = Verdict(text, end)
        letters, repeated = letter_share(text), repeated_share(text)
        if end == len(ids):
            return self._drop(verdict, "unfinished", f"no end of the turn in {end} tokens")
        if not self.controls.isdisjoint(ids[:end]):
            return self._drop(verdict, "control token", "within the text")
        if end < settings.min_tokens or not text:
            return self._drop(verdict, "too short", f"{end} tokens")
        if any(c == "\ufffd" or _not_text(c) for c in text):
            return self._drop(verdict, "broken characters", "bytes that are no text")
        if letters < settings.min_letter_share:
            return self._drop(verdict, "few letters", f"{letters:.0%} ASCII letters")
        if repeated > settings.max_repeated_share:
            return self._drop(verdict, "repetition", f"{repeated:.0%} repeated")
        return verdict

    def all(self, attempts: Iterable[Sequence[int]]) -> list[Verdict]:
        """Verdicts in order; each depends on its attempt and the ones before it only."""
        verdicts = [self.alone(ids) for ids in attempts]
        self._drop_duplicates(verdicts)
        if self.settings.near_duplicates is not None:
            self._drop_near_duplicates(verdicts, self.settings.near_duplicates)
        return verdicts

    def _drop_duplicates(self, verdicts: list[Verdict]) -> None:
        first: dict[str, int] = {}
        for attempt, verdict in enumerate(verdicts):
            if not verdict.reason:
                other = first.setdefault(" ".join(verdict.text.casefold().split()), attempt)
                if other != attempt:
                    self._drop(verdict, "duplicate", f"of attempt {other}")

    def _drop_near_duplicates(self, verdicts: list[Verdict], threshold: float) -> None:
        left = [attempt for attempt, verdict in enumerate(verdicts) if not verdict.reason]
        if not left:
            return
        signatures = np.stack([text_signature(verdicts[attempt].text) for attempt in left])
        for row, other in near_duplicates(signatures, threshold).items():
            self._drop(verdicts[left[row]], "near duplicate", f"of attempt {left[other]}")

    @staticmethod
    def _drop(verdict: Verdict, reason: str, detail: str) -> Verdict:
        verdict.reason, verdict.detail = reason, detail
        return verdict


def text_signature(text: str) -> np.ndarray:
    """MinHash of a text, see `cleaning.signature`; `InputError` without the package `rensa`."""
    return signature({"messages": [{"role": "user", "content": text}]})


def _not_text(character: str) -> bool:
    return unicodedata.category(character) in NOT_TEXT and not character.isspace()


@dataclass
class Written:
    """The attempts up to the one that gave the last wanted prompt; `asked`: made in this run."""

    verdicts: list[Verdict] = field(default_factory=list)
    asked: int = 0

    @property
    def prompts(self) -> list[str]:
        return [verdict.text for verdict in self.verdicts if not verdict.reason]

    def report(self) -> dict[str, Any]:
        """Counts by reason, which with `kept` make up `attempted`, and examples of each."""
        examples: dict[str, list[dict[str, Any]]] = {}
        for attempt, verdict in enumerate(self.verdicts):
            shown = examples.setdefault(verdict.reason, []) if verdict.reason else []
            if verdict.reason and len(shown) < EXAMPLES:
                text = verdict.text[:EXAMPLE_CHARACTERS]
                shown.append({"attempt": attempt, "text": text, "detail": verdict.detail})
        dropped = Counter(verdict.reason for verdict in self.verdicts if verdict.reason)
        return {
            "attempted": len(self.verdicts),
            "kept": len(self.prompts),
            "dropped": dict(dropped.most_common()),
            "tokens": sum(verdict.tokens for verdict in self.verdicts if not verdict.reason),
            "asked": self.asked,
            "examples": examples,
        }


def write_prompts(
    start_engine: Callable[[UserTurn], contextlib.AbstractContextManager[Engine]],
    template: ChatTemplate,
    settings: SelfPrompts,
    store: AttemptStore,
    progress: Callable[[int, int], None],
) -> Written:
    """Let the verifier write until `settings.number` prompts are kept.

    `start_engine` is called when an attempt is missing in `store`, at most once. `progress`:
    called with about how many prompts are kept and how many attempts were made. Raises
    `InputError` with the counts when `settings.max_attempts` attempts a prompt do not suffice;
    the attempts stay in the store.
    """
    turn = template.user_turn()
    judge = Judge(template, turn, settings)
    if settings.near_duplicates is not None:
        text_signature("what is missing must be told before the engine starts")
    limit = math.floor(settings.number * settings.max_attempts)
    attempts = {i: row["ids"] for i, row in store.load(set(range(limit))).items()}
    asked = 0
    with contextlib.ExitStack() as stack:
        engine = None
        while True:
            end = next((i for i in range(limit) if i not in attempts), limit)
            found = _until(judge.all(attempts[i] for i in range(end)), settings.number)
            kept = len(found.prompts)
            if kept == settings.number or end == limit:
                break
            wave = range(end, min(limit, end + _wave(settings, kept, end)))
            missing = [attempt for attempt in wave if attempt not in attempts]
            engine = engine or stack.enter_context(start_engine(turn))
            for attempt, ids in _attempt(engine, turn, settings, missing, store):
                attempts[attempt] = ids
                asked += 1
                kept += not judge.alone(ids).reason
                progress(min(kept, settings.number - 1), asked)
    found.asked = asked
    if kept < settings.number:
        raise InputError(_too_few(found, settings))
    progress(kept, asked)
    return found


def _wave(settings: SelfPrompts, kept: int, made: int) -> int:
    """How many attempts to ask for next, by the share kept so far."""
    share = max(kept / made if made else 1.0, 1 / settings.max_attempts)
    return max(WAVE, math.ceil(SPARE * (settings.number - kept) / share))


def _attempt(
    engine: Engine, turn: UserTurn, settings: SelfPrompts, wanted: list[int], store: AttemptStore
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
            store.add({"id": int(answer.key), "ids": answer.tokens})
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
    report = found.report()
    rows = [
        f"\n  {reason}: {count:,}, such as {report['examples'][reason][0]['text'][:60]!r}"
        f" ({report['examples'][reason][0]['detail']})"
        for reason, count in report["dropped"].items()
    ]
    return (
        f"the verifier wrote {report['kept']:,} usable prompts in {report['attempted']:,} attempts,"
        f" self_prompts.number is {settings.number:,}; lower it or raise self_prompts.max_attempts"
        f" ({settings.max_attempts:g}), what was written stays and is used. Dropped:"
        + "".join(rows)
    )
