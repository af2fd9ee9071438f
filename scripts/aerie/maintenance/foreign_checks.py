"""Checks that another tool's states are what the user states, and loss masks to check them by."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from aerie.common.errors import InputError, UnusableStates
from aerie.maintenance.final_norm import refuse_normed, undo_final_norm
from aerie.maintenance.foreign import ForeignSample, RefusedFile, plain_tensor
from aerie.samples.file import read_samples
from aerie.states.checks import check_states
from aerie.states.convention import Convention
from aerie.states.ids import sample_key
from aerie.states.teacher import Teacher

Mask = npt.NDArray[np.bool_]


def check_foreign(
    foreign: ForeignSample,
    mask: Mask | None,
    convention: Convention,
    teacher: Teacher,
    after_norm: bool,
    greedy: bool,
) -> torch.Tensor:
    """The states as the store keeps them, bf16 [T, ids, hidden]. Raises `RefusedFile`."""
    tokens, states = foreign.tokens, plain_tensor(foreign.states, "states")
    if states.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise RefusedFile("other number format", str(states.dtype))
    wanted = (len(tokens), len(convention.layer_ids), convention.hidden_size)
    if tuple(states.shape) != wanted:
        raise RefusedFile("other shapes", f"states {list(states.shape)}, expected {list(wanted)}")
    states = states.to(torch.bfloat16)
    if not torch.isfinite(states).all():
        raise RefusedFile("states hold NaN or infinity")
    if after_norm:
        last = undo_final_norm(states[:, -1], teacher)
        states = torch.cat([states[:, :-1], last[:, None]], 1)
    else:
        refuse_normed(states[:, -1], teacher)
    states = states.contiguous()
    try:
        check_states(states, tokens, convention)
    except UnusableStates as error:
        raise RefusedFile("states cannot be those of the tokens", str(error)) from None
    if mask is None and foreign.mask is not None:
        mask = foreign.mask.numpy()
    if mask is not None and len(mask) != len(tokens):
        raise RefusedFile("loss mask of another length", f"{len(mask)} of {len(tokens)} tokens")
    if mask is None and greedy:
        raise RefusedFile(
            "no loss mask",
            "which tokens the verifier chose is not known; give the --run that has these samples, "
            "or --answers other",
        )
    chosen = np.ones(len(tokens) - 1, bool) if mask is None else np.asarray(mask, bool)[1:]
    positions = torch.from_numpy(np.flatnonzero(chosen))
    try:
        teacher.check(states[positions], tokens[positions + 1].tolist(), greedy)
    except UnusableStates as error:
        raise RefusedFile(
            "the verifier's head does not lead to the next tokens", str(error)
        ) from None
    return states


def masks_of(run: Path, folder: Path) -> Callable[[str], Mask | None]:
    """Loss masks by sample key: those of the run's samples, else of the data set around `folder`.

    speculators keeps the masks in an Arrow data set in the folder above `hidden_states`.
    Raises `InputError` for a data set without masks.
    """
    known: dict[str, Mask] = {}
    for place in (folder, folder.parent):
        if (place / "dataset_info.json").is_file():
            from datasets import load_from_disk

            try:
                for row in load_from_disk(str(place)).with_format(None):
                    known[sample_key(row["input_ids"])] = np.asarray(row["loss_mask"], bool)
            except Exception as error:  # its readers raise many kinds
                raise InputError(
                    f"{place}: expected a data set with the columns input_ids and loss_mask; "
                    f"found {type(error).__name__}: {error}"
                ) from None
            break
    samples = run / "samples/samples.parquet"
    if samples.is_file():
        for row in read_samples(samples).values():
            known[sample_key(row.input_ids)] = np.asarray(row.loss_mask, bool)
    return known.get
