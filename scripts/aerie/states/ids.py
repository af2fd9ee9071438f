"""Names by content: the key of a sample, the id of a shard, and where one shard ends."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from aerie.common.files import digest

LossMask = Sequence[bool] | npt.NDArray[np.bool_]
"""One value a token: whether a loss is taken there."""


def sample_key(tokens: Iterable[int], loss_mask: LossMask | None = None) -> str:
    """Hash of a sample's tokens: the name of its states within one convention.

    With `loss_mask` it covers the mask too, for conventions whose states depend on the mask.
    """
    data = np.asarray(list(tokens), dtype="<i4").tobytes()
    if loss_mask is not None:
        data += np.asarray(loss_mask, dtype=np.uint8).tobytes()
    return xxhash.xxh3_128_hexdigest(data)


def shard_id(sample_keys: Iterable[str]) -> str:
    """Name of the shard that holds these samples in this order, in any convention's folder."""
    return digest(list(sample_keys))


def group_records(ids: list[str], mean: int) -> list[list[int]]:
    """Cut records into one group a shard by their ids; return lists of positions, in order.

    A group ends after a record whose id's hash is a multiple of `mean`, but holds at least
    `mean / 4` and at most `4 * mean` records. So an edit moves only the cuts around it
    (content-defined chunking; Muthitacharoen et al., SOSP 2001).
    """
    groups: list[list[int]] = []
    current: list[int] = []
    for position, record in enumerate(ids):
        current.append(position)
        cut = int(digest(record, size=8), 16) % mean == 0
        if (cut and len(current) >= max(1, mean // 4)) or len(current) >= 4 * mean:
            groups.append(current)
            current = []
    if current:
        groups.append(current)
    return groups
