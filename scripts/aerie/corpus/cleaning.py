"""Which conversations are kept: length, duplicates, contamination, weight; the held-out side."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.progress import JobProgress
from aerie.config import Corpus, Source
from aerie.corpus.conversations import Conversation, Located, conversations
from aerie.corpus.records import Meter
from aerie.corpus.report import EvaluationSet, Tally

MB = 10**6
PERMUTATIONS = 128
"""MinHash values of a conversation; they estimate similarity to about ± 0.035."""
ROWS = 4
"""MinHash values of a band: similar conversations agree in at least one of the 32 bands."""
NEAR_DUPLICATES_FROM = 10_000
"""Near duplicates are looked for in corpora of at least this many conversations."""
CONTAMINATION_WORDS = 13
"""A conversation that shares this many words in a row with an evaluation prompt is dropped."""


def duplicate_key(conversation: Conversation) -> bytes:
    """16 bytes, equal for conversations that differ at most in white space around their texts."""
    texts = [m["content"] for m in conversation["messages"]]
    if all(text == text.strip() for text in texts):
        return bytes.fromhex(conversation["id"])
    messages = [{**m, "content": m["content"].strip()} for m in conversation["messages"]]
    return bytes.fromhex(digest(messages, conversation.get("tools", [])))


def characters(conversation: Conversation) -> int:
    """Length of all texts together, characters."""
    return sum(len(m["content"]) for m in conversation["messages"])


def prompt_hash(conversation: Conversation) -> int:
    """Hash of the first user text, with case and white space folded; 0 to 2^64 - 1.

    Prompts with a small hash are held out. The rest of the corpus does not matter, so a prompt
    stays on its side when the corpus grows.
    """
    text = next(m["content"] for m in conversation["messages"] if m["role"] == "user")
    return _hash(" ".join(text.casefold().split()))


def sampled(conversation: Conversation, weight: float) -> bool:
    """Whether the conversation is in the share `weight` of its source, chosen by content."""
    return weight >= 1 or _hash(f"weight {conversation['id']}") < weight * 2**64


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def heldout_border(hashes: Sequence[int], share: float) -> tuple[int, str | None]:
    """The hash below which prompts are held out, and a warning or None.

    The border is at `share` of the range of hashes. Where that leaves a side empty although there
    are two distinct prompts, it moves past the smallest or the largest hash, so that each side has
    one. A single prompt is trained on.
    """
    border = int(share * 2**64)
    smallest, largest = min(hashes, default=0), max(hashes, default=0)
    if smallest == largest:
        return 0, (
            "there is only one distinct prompt: it is trained on and the held-out set is empty, "
            "so nothing can be validated or measured on held-out prompts; add prompts"
        )
    if not smallest < border <= largest:
        side = "held-out" if border <= smallest else "training"
        return (smallest + 1 if border <= smallest else largest), (
            f"the {side} set would have been empty with held-out share {share:g}: one prompt was "
            "moved there; with more prompts it may change sides"
        )
    return border, None


WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return WORD.findall(text.casefold())


class Contamination:
    """Evaluation prompts, and whether a conversation overlaps one.

    It does when it shares `CONTAMINATION_WORDS` words in a row with a prompt, or when one of its
    user turns is a prompt with fewer words.

    Attributes: `sets`, by name how many prompts a set has and how many conversations it dropped.
    """

    def __init__(self) -> None:
        self.sets: dict[str, EvaluationSet] = {}
        self.runs: dict[str, str] = {}
        self.whole: dict[str, str] = {}

    def add(self, name: str, conversation: Conversation) -> None:
        """Add a prompt of the evaluation set `name`."""
        for message in conversation["messages"]:
            words = words_of(message["content"]) if message["role"] == "user" else []
            if len(words) >= CONTAMINATION_WORDS:
                for run in _runs(words):
                    self.runs.setdefault(run, name)
            elif words:
                self.whole.setdefault(" ".join(words), name)

    def find(self, conversation: Conversation) -> tuple[str, str] | None:
        """Name of the evaluation set and the shared words, or None."""
        for message in conversation["messages"]:
            if message["role"] in ("system", "tool"):
                continue
            words = words_of(message["content"])
            text = " ".join(words) if message["role"] == "user" else ""
            if text in self.whole:
                return self.whole[text], text
            for run in _runs(words):
                if run in self.runs:
                    return self.runs[run], run
        return None


def _runs(words: list[str]) -> Iterable[str]:
    length = CONTAMINATION_WORDS
    return (" ".join(words[i : i + length]) for i in range(len(words) - length + 1))


def cleaned(
    corpus: Corpus,
    mode: str,
    tallies: dict[str, Tally],
    meter: Meter,
    evaluation: Contamination | None = None,
    progress: JobProgress | None = None,
) -> Iterator[Located]:
    """Conversations of all sources in order, without duplicates and what the filters drop.

    What is dropped is counted in the source's tally, and in `evaluation.sets`.
    """
    seen: set[bytes] = set()
    number = 0
    for source, (name, tally) in zip(corpus.sources, tallies.items(), strict=True):
        for found in conversations(source, name, corpus, mode, tally, meter):
            number += 1
            if progress and number % 500 == 0:
                note = f"{number:,} conversations"
                progress.update(meter.done // MB, note, conversations=number)
            reason, detail = _judge(found.conversation, corpus, source, seen, evaluation)
            if reason:
                where = {"file": found.file, "place": found.place, "id": found.conversation["id"]}
                tally.drop(reason, **where, detail=detail)
                continue
            tally.records_kept += 1
            yield found
            if len(seen) == corpus.limit:
                return
            if tally.records_kept == source.limit:
                break


def _judge(
    conversation: Conversation,
    corpus: Corpus,
    source: Source,
    seen: set[bytes],
    evaluation: Contamination | None,
) -> tuple[str, str]:
    """Why a conversation is dropped: reason and detail. Both are empty when it is kept; its key
    is then added to `seen`."""
    length = characters(conversation)
    if length > corpus.max_characters:
        return "too long", f"{length} characters, corpus.max_characters {corpus.max_characters}"
    key = duplicate_key(conversation)
    if key in seen:
        return "duplicate", ""
    if evaluation and (shared := evaluation.find(conversation)):
        evaluation.sets[shared[0]].records_dropped += 1
        return "contaminated", f"{shared[0]}: {shared[1]}"
    if not sampled(conversation, source.weight):
        return "outside the source's weight", ""
    seen.add(key)
    return "", ""


def signature(conversation: Conversation) -> np.ndarray:
    """MinHash of the runs of three words in user and assistant turns: uint32 [PERMUTATIONS].

    System and tool texts do not count, since many conversations share them. Raises `InputError`
    without the package `rensa`.
    """
    try:
        from rensa import RMinHash
    except ImportError:
        raise InputError(
            "near duplicates: needs the package `rensa`; install it, or set "
            "corpus.near_duplicates to null"
        ) from None
    texts = [m["content"] for m in conversation["messages"] if m["role"] in ("user", "assistant")]
    words = words_of("\n".join(texts)) or texts
    runs = [" ".join(run) for run in zip(words, words[1:], words[2:], strict=False)] or words
    sketch = RMinHash(num_perm=PERMUTATIONS, seed=1)
    sketch.update(runs)
    return np.array(sketch.digest(), dtype=np.uint32)


def near_duplicates(signatures: np.ndarray, threshold: float) -> dict[int, int]:
    """Row → earlier row that it is a near duplicate of; `signatures` is uint32 [n, PERMUTATIONS].

    Rows that agree in a band of `ROWS` values are compared with the first of them.
    """
    found: dict[int, int] = {}
    factors = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 1], np.uint64)
    for start in range(0, signatures.shape[1], ROWS):
        keys = np.zeros(len(signatures), np.uint64)
        for column, factor in enumerate(factors, start):
            keys = keys * factor + signatures[:, column]
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        rows = np.flatnonzero(first[group] != np.arange(len(group)))
        for part in np.array_split(rows, len(rows) // 50_000 + 1):
            others = first[group[part]]
            same = (signatures[part] == signatures[others]).mean(axis=1) >= threshold
            for row, other in zip(part[same].tolist(), others[same].tolist(), strict=True):
                found.setdefault(row, other)
    return found
