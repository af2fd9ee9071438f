"""Draft vocabularies: the verifier's most frequent tokens, and the maps to and from them.

Convention of speculators and vLLM: `d2t[i] = target id - i` (int64), `t2d` bool over the model's
padded vocabulary, draft ids in the order of target ids.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.samples.tokenize import TokenizedSample


def count_tokens(rows: Iterable[TokenizedSample], vocab_size: int) -> np.ndarray:
    """How often each token is a target: int64 [vocab_size].

    Counted are the supervised tokens, and the one that followed a row's last supervised token.
    Raises `InputError` for an id outside the model's vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        ids = np.asarray(row.input_ids)[np.asarray(row.loss_mask, dtype=bool)]
        if row.next_token >= 0 and row.loss_mask and row.loss_mask[-1]:
            ids = np.append(ids, row.next_token)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
            raise InputError(
                f"sample {row.id}: token id {wrong} lies outside the model's vocabulary of "
                f"{vocab_size}; the samples were tokenised for another model"
            )
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def build_maps(counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """`t2d` bool [vocab], `d2t` int64 [size] for the `size` most frequent tokens.

    Ties go to the lower id. Raises `InputError` when `size` is larger than the vocabulary.
    """
    if size > len(counts):
        raise InputError(
            f"vocabulary: {size} is larger than the model's vocabulary of {len(counts)}; "
            "choose a smaller one or `full`"
        )
    order = np.lexsort((np.arange(len(counts)), -counts))
    chosen = np.sort(order[:size])
    t2d = np.zeros(len(counts), dtype=bool)
    t2d[chosen] = True
    return t2d, chosen.astype(np.int64) - np.arange(size, dtype=np.int64)


def describe_coverage(
    counts: np.ndarray, size: int, tokenizer_size: int, tokenizer: str
) -> dict[str, Any]:
    """How much of the targets a draft vocabulary of `size` covers, and other sizes beside it.

    Keys: `size`, `covered` (share of target tokens), `seen` (distinct targets), `unseen` (map
    entries that never occur), `padded` (ids of the map beyond the tokenizer), `coverage` (share
    by size), `counts` and `tokenizer` (hashes that the map belongs to).
    """
    total = max(1, int(counts.sum()))
    t2d, _ = build_maps(counts, size)
    ranked = np.cumsum(np.sort(counts)[::-1])
    sizes = sorted({s for s in (250 * 2**i for i in range(11)) if s < len(counts)} | {size})
    return {
        "size": size,
        "covered": float(counts[t2d].sum() / total),
        "target_tokens": int(counts.sum()),
        "seen": int((counts > 0).sum()),
        "unseen": int((counts[t2d] == 0).sum()),
        "padded": int(t2d[tokenizer_size:].sum()),
        "coverage": {str(s): float(ranked[s - 1] / total) for s in sizes},
        "counts": digest(counts.tolist()),
        "tokenizer": tokenizer,
    }
