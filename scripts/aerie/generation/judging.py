"""Which of the prompts that the verifier wrote are kept."""

import string
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.chat.template import ChatTemplate, UserTurn
from aerie.corpus.cleaning import near_duplicates, signature, words_of

MIN_TOKENS = 4
"""Shorter prompts are dropped, tokens."""
MAX_REPEATED_SHARE = 0.3
"""Prompts with a larger `repeated_share` are dropped."""
NEAR_DUPLICATES = 0.8
"""Similarity (Jaccard, of runs of three words) from which two prompts are near duplicates."""
NOT_TEXT = {"Cc", "Cn", "Co", "Cs"}
"""Unicode categories of characters that do not occur in text, except for white space."""


@dataclass
class Verdict:
    """An attempt's text and length in tokens, and why it was dropped ("": it is kept)."""

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
    """Share of lines, or of runs of three words if larger, that repeat an earlier one, 0 to 1."""
    words = words_of(text)
    runs = list(zip(words, words[1:], words[2:], strict=False))
    lines = [line.strip() for line in text.splitlines() if words_of(line)]
    return max(1 - len(set(parts)) / len(parts) if parts else 0.0 for parts in (runs, lines))


def text_signature(text: str) -> np.ndarray:
    """MinHash of a text, see `cleaning.signature`; `InputError` without the package `rensa`."""
    return signature({"messages": [{"role": "user", "content": text}]})


class Judge:
    """Decides which attempts are kept. `min_letter_share`: see the section `self_prompts`."""

    def __init__(self, template: ChatTemplate, turn: UserTurn, min_letter_share: float):
        self.template, self.turn, self.min_letter_share = template, turn, min_letter_share
        self.controls = template.control_ids

    def judge(self, ids: Sequence[int]) -> Verdict:
        """The verdict on one attempt by itself; `ids` as generated."""
        end = next((i for i, token in enumerate(ids) if token in self.turn.end_ids), len(ids))
        text = self.template.decode(list(ids[:end])).strip()
        verdict = Verdict(text, end)
        letters, repeated = letter_share(text), repeated_share(text)
        if end == len(ids):
            return _drop(verdict, "unfinished", f"no end of the turn in {end} tokens")
        if not self.controls.isdisjoint(ids[:end]):
            return _drop(verdict, "control token", "within the text")
        if end < MIN_TOKENS or not text:
            return _drop(verdict, "too short", f"{end} tokens")
        if any(c == "\ufffd" or _not_text(c) for c in text):
            return _drop(verdict, "broken characters", "bytes that are no text")
        if letters < self.min_letter_share:
            return _drop(verdict, "few letters", f"{letters:.0%} ASCII letters")
        if repeated > MAX_REPEATED_SHARE:
            return _drop(verdict, "repetition", f"{repeated:.0%} repeated")
        return verdict

    def judge_all(self, attempts: Iterable[Sequence[int]]) -> list[Verdict]:
        """Verdicts in order; each depends on its attempt and the earlier ones only."""
        verdicts = [self.judge(ids) for ids in attempts]
        _drop_duplicates(verdicts)
        _drop_near_duplicates(verdicts)
        return verdicts


def _drop_duplicates(verdicts: list[Verdict]) -> None:
    first: dict[str, int] = {}
    for attempt, verdict in enumerate(verdicts):
        if not verdict.reason:
            other = first.setdefault(" ".join(verdict.text.casefold().split()), attempt)
            if other != attempt:
                _drop(verdict, "duplicate", f"of attempt {other}")


def _drop_near_duplicates(verdicts: list[Verdict]) -> None:
    left = [attempt for attempt, verdict in enumerate(verdicts) if not verdict.reason]
    if not left:
        return
    signatures = np.stack([text_signature(verdicts[attempt].text) for attempt in left])
    for row, other in near_duplicates(signatures, NEAR_DUPLICATES).items():
        _drop(verdicts[left[row]], "near duplicate", f"of attempt {left[other]}")


def _drop(verdict: Verdict, reason: str, detail: str) -> Verdict:
    verdict.reason, verdict.detail = reason, detail
    return verdict


def _not_text(character: str) -> bool:
    return unicodedata.category(character) in NOT_TEXT and not character.isspace()
