"""Draft vocabularies: the verifier's most frequent tokens, and the maps to and from them.

Convention of speculators and vLLM: `d2t[i] = target id - i` (int64), `t2d` bool over the model's
padded vocabulary, draft ids in the order of target ids.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aerie.common.errors import InputError
from aerie.common.files import atomic_write, digest
from aerie.samples.coverage import Coverage
from aerie.samples.file import TokenizedSample, read_samples
from aerie.verifier.fingerprint import Fingerprint


def count_tokens(samples: Iterable[TokenizedSample], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token is a target: int64 [vocab_size].

    Counts the supervised tokens, and the token that followed a sample's last supervised one.
    Raises `InputError` for an id outside the model's vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        ids = np.asarray(sample.input_ids)[np.asarray(sample.loss_mask, dtype=bool)]
        if sample.next_token >= 0 and sample.loss_mask and sample.loss_mask[-1]:
            ids = np.append(ids, sample.next_token)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
            raise InputError(
                f"sample {sample.id}: token id {wrong} is outside the model's vocabulary of "
                f"{vocab_size}; the samples were tokenized for another model"
            )
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def build_maps(
    counts: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """`t2d` bool [vocabulary] and `d2t` int64 [size] of the `size` most frequent tokens.

    Ties go to the lower id. Raises `InputError` if `size` is larger than the vocabulary.
    """
    if size > len(counts):
        raise InputError(
            f"vocabulary: {size} is larger than the model's vocabulary of {len(counts)}; "
            "choose a smaller one or `full`"
        )
    order = np.lexsort((np.arange(len(counts)), -counts))
    chosen = np.sort(order[:size])
    t2d = np.zeros(len(counts), dtype=np.bool_)
    t2d[chosen] = True
    return t2d, chosen.astype(np.int64) - np.arange(size, dtype=np.int64)


def describe_coverage(
    counts: npt.NDArray[np.int64], size: int, tokenizer_size: int, tokenizer: str
) -> Coverage:
    """Coverage of the draft vocabulary of `size` tokens, and of 250, 500, 1,000 … beside it.

    `tokenizer_size`: ids that the tokenizer has; `tokenizer`: its hash.
    """
    total = max(1, int(counts.sum()))
    t2d, _ = build_maps(counts, size)
    ranked = np.cumsum(np.sort(counts)[::-1])
    sizes = sorted({s for s in (250 * 2**i for i in range(11)) if s < len(counts)} | {size})
    return Coverage(
        size=size,
        covered=float(counts[t2d].sum() / total),
        target_tokens=int(counts.sum()),
        seen=int((counts > 0).sum()),
        unseen=int((counts[t2d] == 0).sum()),
        padded=int(t2d[tokenizer_size:].sum()),
        coverage={str(s): float(ranked[s - 1] / total) for s in sizes},
        counts=digest(counts.tolist()),
        tokenizer=tokenizer,
    )


def map_vocabulary(samples: Path, size: int, verifier: Fingerprint, output: Path) -> None:
    """Write `t2d.npy`, `d2t.npy` and `coverage.json` into the folder `output`.

    `samples`: samples.parquet, of which the training samples count.
    """
    train = [sample for sample in read_samples(samples).values() if sample.split == "train"]
    counts = count_tokens(train, verifier.vocab_size)
    for name, array in zip(("t2d", "d2t"), build_maps(counts, size), strict=True):
        with atomic_write(output / f"{name}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, array)
    coverage = describe_coverage(counts, size, verifier.tokenizer_size, verifier.tokenizer)
    coverage.write(output / "coverage.json")
