"""What of a corpus is left out, duplicates and contamination among it, and the held-out side."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.progress import JobProgress
from aerie.config import Corpus, Source
from aerie.corpus.layouts import Conversation, Tally, conversations
from aerie.corpus.reading import Meter

MB = 10**6
PERMUTATIONS = 128
"""MinHash values a conversation; similarity is estimated to about ± 0.035."""
ROWS = 4
"""MinHash values a band: similar conversations meet in at least one of the 32 bands."""


def duplicate_key(record: dict[str, Any]) -> bytes:
    """16 bytes, equal for records that differ in white space around their texts at most."""
    texts = [m["content"] for m in record["messages"]]
    if all(text == text.strip() for text in texts):
        return bytes.fromhex(record["id"])
    messages = [{**m, "content": m["content"].strip()} for m in record["messages"]]
    return bytes.fromhex(digest(messages, record.get("tools", [])))


def characters(record: dict[str, Any]) -> int:
    """Length of all texts together, characters."""
    return sum(len(m["content"]) for m in record["messages"])


def prompt_hash(record: dict[str, Any]) -> int:
    """Hash of the first user text, letters' case and white space folded; 0 to 2^64 - 1.

    Prompts with a small hash are held out. Nothing else of the corpus is looked at, so a prompt
    does not change side when the corpus grows.
    """
    text = next(m["content"] for m in record["messages"] if m["role"] == "user")
    return _hash(" ".join(text.casefold().split()))


def sampled(record: dict[str, Any], weight: float) -> bool:
    """Whether the record is in the share `weight` of its source, by content."""
    return weight >= 1 or _hash(f"weight {record['id']}") < weight * 2**64


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def heldout_border(hashes: Sequence[int], share: float) -> tuple[int, str | None]:
    """Prompts with a hash below the border are held out; and what to tell about it, if anything.

    The border is `share` of the hashes' range. Where that leaves a side empty although there are
    two distinct prompts, it is moved past the smallest or the largest hash, so that both sides
    have one. A single prompt is trained on.
    """
    border = int(share * 2**64)
    smallest, largest = min(hashes, default=0), max(hashes, default=0)
    if smallest == largest:
        return 0, (
            "there is one distinct prompt only: it is trained on and the held-out set is empty, "
            "so nothing can be validated or measured on held-out prompts; add prompts"
        )
    if not smallest < border <= largest:
        side = "held-out" if border <= smallest else "training"
        return (smallest + 1 if border <= smallest else largest), (
            f"the {side} set would have been empty with held-out share {share:g}: one prompt was "
            "moved there; with more prompts it may change side"
        )
    return border, None


WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    return WORD.findall(text.casefold())


class Contamination:
    """Evaluation prompts, and whether a conversation shares `length` words in a row with one.

    Prompts with fewer words count when they are the whole of a user turn.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.runs: dict[str, str] = {}
        self.whole: dict[str, str] = {}

    def add(self, name: str, record: dict[str, Any]) -> None:
        for message in record["messages"]:
            words = words_of(message["content"]) if message["role"] == "user" else []
            if len(words) >= self.length:
                for run in self._runs(words):
                    self.runs.setdefault(run, name)
            elif words:
                self.whole.setdefault(" ".join(words), name)

    def _runs(self, words: list[str]) -> Iterable[str]:
        return (" ".join(words[i : i + self.length]) for i in range(len(words) - self.length + 1))

    def find(self, record: dict[str, Any]) -> tuple[str, str] | None:
        """Name of the evaluation set and the words shared, or None."""
        for message in record["messages"]:
            if message["role"] in ("system", "tool"):
                continue
            words = words_of(message["content"])
            text = " ".join(words) if message["role"] == "user" else ""
            if text in self.whole:
                return self.whole[text], text
            for run in self._runs(words):
                if run in self.runs:
                    return self.runs[run], run
        return None


def cleaned(
    corpus: Corpus,
    mode: str,
    tallies: dict[str, Tally],
    meter: Meter,
    evaluation: Contamination | None = None,
    sets: dict[str, dict[str, int]] | None = None,
    progress: JobProgress | None = None,
) -> Iterator[Conversation]:
    """Conversations of all sources in order, without duplicates and what the filters take out.

    `sets`: what is known of each set in `evaluation`; what it takes out is counted there.
    """
    seen: set[bytes] = set()
    number = 0
    for source, (name, tally) in zip(corpus.sources, tallies.items(), strict=True):
        for found in conversations(source, name, corpus, mode, tally, meter):
            number += 1
            if progress and number % 500 == 0:
                note = f"{number:,} conversations"
                progress.update(meter.done // MB, note, conversations=number)
            reason, detail = _left_out(found.record, corpus, source, seen, evaluation)
            if reason:
                if reason == "contaminated":
                    sets[detail.rpartition(": ")[0]]["records_dropped"] += 1
                where = {"file": found.file, "place": found.place, "id": found.record["id"]}
                tally.drop(reason, **where, detail=detail)
                continue
            tally.records_kept += 1
            yield found
            if len(seen) == corpus.limit:
                return
            if tally.records_kept == source.limit:
                break


def _left_out(
    record: dict[str, Any],
    corpus: Corpus,
    source: Source,
    seen: set[bytes],
    evaluation: Contamination | None,
) -> tuple[str, str]:
    """Reason and detail for which a record is left out; two empty texts, and its key is `seen`,
    when it is kept."""
    length = characters(record)
    if length < corpus.min_characters:
        return "too short", f"{length} characters, corpus.min_characters {corpus.min_characters}"
    if length > corpus.max_characters:
        return "too long", f"{length} characters, corpus.max_characters {corpus.max_characters}"
    key = duplicate_key(record)
    if key in seen:
        return "duplicate", ""
    if evaluation and (shared := evaluation.find(record)):
        return "contaminated", f"{shared[0]}: {shared[1]}"
    if not sampled(record, source.weight):
        return "outside the source's weight", ""
    seen.add(key)
    return "", ""


def signature(record: dict[str, Any]) -> np.ndarray:
    """MinHash of the runs of three words in user and assistant turns; (PERMUTATIONS,) uint32.

    System and tool texts are left out: many conversations share them.
    """
    try:
        from rensa import RMinHash
    except ImportError:
        raise InputError(
            "near duplicates: needs the package `rensa`; install it, or set "
            "corpus.near_duplicates to null (--near-duplicates null)"
        ) from None
    texts = [m["content"] for m in record["messages"] if m["role"] in ("user", "assistant")]
    words = words_of("\n".join(texts)) or texts
    runs = [" ".join(run) for run in zip(words, words[1:], words[2:], strict=False)] or words
    sketch = RMinHash(num_perm=PERMUTATIONS, seed=1)
    sketch.update(runs)
    return np.array(sketch.digest(), dtype=np.uint32)


def near_duplicates(signatures: np.ndarray, threshold: float) -> dict[int, int]:
    """Row → earlier row that it is a near duplicate of; signatures are (n, PERMUTATIONS).

    In each band of `ROWS` values, rows that agree are compared with the first of them.
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
