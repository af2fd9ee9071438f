"""Checks that states can be those of their tokens, made before a shard gets its name."""

import functools

import numpy as np
import numpy.typing as npt
import torch

from aerie.common.errors import UnusableStates
from aerie.states import kernels
from aerie.states.codec import bits_of, rows_by_layer
from aerie.states.convention import Convention
from aerie.states.ids import LossMask


def check_states(
    states: torch.Tensor,
    tokens: torch.Tensor,
    convention: Convention,
    loss_mask: LossMask | None = None,
    rounded: bool = False,
) -> None:
    """Raise `UnusableStates` for states that cannot be those of `tokens`.

    `states` bf16 [T, ids, hidden], `tokens` int64 [T]. With `loss_mask` [T] the last layer is
    checked only where it is set. States that were `rounded` to fp8 are checked for shape, NaN and
    infinity only: with one scale a token, the small values of one layer round to zero where
    another layer's are some ten thousand times as large.

    Refused are: a wrong shape or dtype; NaN or infinity; a row that has one value in all
    channels, or is mostly zeros; a row that is the same at different tokens; two equal layers.
    """
    wanted = (len(tokens), len(convention.layer_ids), convention.hidden_size)
    if tuple(states.shape) != wanted or states.dtype != torch.bfloat16:
        raise UnusableStates(
            f"states are {states.dtype} {list(states.shape)}, expected torch.bfloat16 "
            f"{list(wanted)} for {len(tokens)} tokens"
        )
    bits = bits_of(states)
    digests = np.empty(wanted[:2], np.uint32)
    last = np.ones(len(bits), bool) if loss_mask is None else np.asarray(loss_mask, dtype=bool)
    faults = kernels.scan(bits, last, _weights(wanted[2]), digests)
    if faults & kernels.NOT_FINITE:
        raise UnusableStates("states hold NaN or infinity")
    if rounded:
        return
    if faults & kernels.CONSTANT:
        raise UnusableStates("states are the same in all channels of a layer")
    if faults & kernels.ZEROS:
        raise UnusableStates("states are mostly zeros at a position")
    ids = tokens.numpy()
    for k, places in enumerate(rows_by_layer(wanted[0], wanted[1], loss_mask)):
        order = places[np.argsort(digests[places, k], kind="stable")]
        same = np.flatnonzero(digests[order[1:], k] == digests[order[:-1], k])
        for a, b in zip(order[same], order[same + 1], strict=True):
            if ids[a] != ids[b] and np.array_equal(bits[a, k], bits[b, k]):
                raise UnusableStates(
                    f"states are the same at different tokens: positions {a} and {b} of layer "
                    f"{convention.layer_ids[k]}"
                )
        for other in range(k):
            if np.array_equal(digests[:, k], digests[:, other]) and np.array_equal(
                bits[:, k], bits[:, other]
            ):
                raise UnusableStates(
                    f"states of layers {convention.layer_ids[other]} and "
                    f"{convention.layer_ids[k]} are the same"
                )


@functools.cache
def _weights(width: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(0).integers(0, 1 << 31, width, dtype=np.uint32) | np.uint32(1)
