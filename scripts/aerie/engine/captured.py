"""Files of captured states, from the connector's writing to their reader.

`<name>` appears only when it is complete; `<name>.error` takes its place if the states could not
be saved.
"""

import contextlib
import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from aerie.common.errors import InputError
from aerie.common.files import is_disk_full
from aerie.engine.protocol import Answer, Failure


def explain(path: str, error: BaseException) -> None:
    """Leave the reason why the states for `path` could not be saved."""
    temporary = f"{path}.why"
    with (
        contextlib.suppress(OSError),  # a full disk still takes an empty file
        open(temporary, "w", encoding="utf-8") as file,
    ):
        file.write(f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):  # the reader times out and names the missing file
        os.replace(temporary, f"{path}.error")


def with_states(answer: Answer) -> Answer | None:
    """The answer once its states are saved; a `Failure` if they cannot be; None until then.

    Raises `InputError` when the folder is full.
    """
    if answer.states is None:
        return answer
    failed = Path(f"{answer.states}.error")
    if not failed.exists():
        return answer if answer.states.exists() else None
    reason = failed.read_text(encoding="utf-8")
    if not reason or is_disk_full(reason):  # empty: there was no room for the reason either
        raise InputError(
            f"{failed.parent}: no space left for captured states"
            f"{f' ({reason})' if reason else ''}; another program fills this folder. Free some "
            "space and run again: the job continues where it stopped"
        )
    failed.unlink()
    return Failure(
        answer.key,
        answer.prompt,
        answer.tokens,
        answer.finish,
        None,
        f"its states were not saved: {reason}",
    )


def read_captured(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """States [tokens, ids, hidden] bf16 and token ids [tokens] int64 of one request.

    Removes the file. Its pages stay mapped by the tensors, so states that are staged in memory
    are not held twice.
    """
    tensors = load_file(path)
    path.unlink()
    return tensors["hidden_states"], tensors["token_ids"]
