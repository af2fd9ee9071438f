"""Reading hidden states that other trainers wrote.

- speculators' `hs_*.safetensors`: `token_ids` [T], `hidden_states` [T, ids, hidden]
- its older `.pt` files: `input_ids` [T], `loss_mask` [T], `hidden_states`: a list of [T, hidden],
  or [T, ids, hidden]
- SpecForge's `.ckpt`: `input_ids` [T], `loss_mask` [T], `aux_hidden_state` [1, T, aux x hidden],
  `hidden_state` [1, T, hidden], the last one after the final norm

Sources: speculators 0.9.0 `train/data.py`, hs-connectors 0.9.0 `transfer.py`, SpecForge
`scripts/prepare_hidden_states.py` and `specforge/data/preprocessing.py`.

These files are data, never code: pickles are read with `weights_only`.
"""

import gzip
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

BESIDE = re.compile(r"aerie\.json|dataset_info\.json|state\.json|data-\d+-of-\d+\.arrow")
"""Names of the files that an export writes beside its samples."""


class RefusedFile(Exception):
    """A file that cannot be imported: `reason` to count it under, and what exactly is wrong."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass
class ForeignSample:
    """One sample of another tool: `tokens` int64 [T], `states` [T, ids, hidden] in the file's
    order, `mask` bool [T], or None if the file has no mask."""

    tokens: torch.Tensor
    states: torch.Tensor
    mask: torch.Tensor | None


def read_tokens(path: Path, vocab_size: int) -> torch.Tensor:
    """Token ids int64 [T] of a file, without reading its states. Raises `RefusedFile`."""
    if path.name.endswith(".safetensors"):
        tokens = _row(_read_hs(path, "token_ids"), "token_ids")
    else:
        data = _load_pickle(path)
        _need(data, "input_ids")
        tokens = _row(data["input_ids"], "input_ids")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise RefusedFile("token ids outside the verifier's vocabulary")
    return tokens


def read_foreign(path: Path) -> ForeignSample:
    """Read one file of any known layout. Raises `RefusedFile`."""
    if path.name.endswith(".safetensors"):
        tokens = _row(_read_hs(path, "token_ids"), "token_ids")
        return ForeignSample(tokens, _read_hs(path, "hidden_states"), None)
    data = _load_pickle(path)
    return _from_pt(data) if path.name.endswith(".pt") else _from_ckpt(data)


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of known layouts under `folder` in the order of their numbers, and the others.

    Files that an export writes beside its samples are in neither list.
    """
    known: list[Path] = []
    others: list[Path] = []
    for path in folder.rglob("*"):
        if path.is_file() and not (path.parent == folder and BESIDE.fullmatch(path.name)):
            hs = path.name.startswith("hs_") and path.suffix == ".safetensors"
            ours = hs or path.name.endswith((".pt", ".ckpt", ".ckpt.gz"))
            (known if ours else others).append(path)

    def numbers(path: Path) -> list[Any]:
        parts = re.split(r"(\d+)", str(path.relative_to(folder)))
        return [int(p) if p.isdigit() else p for p in parts]

    return sorted(known, key=numbers), sorted(others)


def _read_hs(path: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            if "hidden_states_scales" in names:
                raise RefusedFile("quantised to fp8", "expected bf16 states")
            if not {"token_ids", "hidden_states"} <= names:
                raise RefusedFile("other content", f"found tensors {sorted(names)[:6]}")
            return file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise RefusedFile("not readable", str(error)) from None


def _load_pickle(path: Path) -> dict[str, Any]:
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path) as file:
                data = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        else:
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a hostile or damaged pickle may raise anything
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise RefusedFile("pickle holds more than tensors", text) from None
        raise RefusedFile("not readable", text) from None
    if not isinstance(data, dict):
        raise RefusedFile("other content", f"found {type(data).__name__}, expected a dict")
    return data


def _from_pt(data: dict[str, Any]) -> ForeignSample:
    _need(data, "input_ids", "loss_mask", "hidden_states")
    states = data["hidden_states"]
    if isinstance(states, (list, tuple)):
        parts = [plain_tensor(s, "hidden_states") for s in states]
        if not parts or any(p.ndim != 2 or p.shape != parts[0].shape for p in parts):
            raise RefusedFile("other shapes", f"hidden_states: {[list(p.shape) for p in parts]}")
        states = torch.stack(parts, 1)
    return ForeignSample(
        _row(data["input_ids"], "input_ids"), plain_tensor(states, "hidden_states"), _mask(data)
    )


def _from_ckpt(data: dict[str, Any]) -> ForeignSample:
    _need(data, "input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
    last = plain_tensor(data["hidden_state"], "hidden_state")
    aux = plain_tensor(data["aux_hidden_state"], "aux_hidden_state")
    last = last.squeeze(0) if last.ndim == 3 else last
    aux = aux.squeeze(0) if aux.ndim == 3 else aux
    if last.ndim != 2 or aux.ndim != 2 or len(last) != len(aux) or aux.shape[1] % last.shape[1]:
        raise RefusedFile(
            "other shapes",
            f"hidden_state {list(last.shape)}, aux_hidden_state {list(aux.shape)}",
        )
    states = torch.cat([aux.reshape(len(aux), -1, last.shape[1]), last[:, None]], 1)
    return ForeignSample(_row(data["input_ids"], "input_ids"), states, _mask(data))


def _need(data: dict[str, Any], *names: str) -> None:
    missing = [n for n in names if data.get(n) is None]
    if missing:
        raise RefusedFile(
            "other content", f"keys {missing} are missing, found {sorted(map(str, data))}"
        )


def plain_tensor(value: Any, name: str) -> torch.Tensor:
    """A dense tensor that is no larger than the memory behind it."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise RefusedFile("other content", f"{name} is not a dense tensor")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise RefusedFile("other content", f"{name} is larger than what the file holds")
    return value


def _row(value: Any, name: str) -> torch.Tensor:
    """int64 [T] of a tensor [T] or [1, T] of whole numbers."""
    tensor = plain_tensor(value, name)
    tensor = tensor.squeeze(0) if tensor.ndim == 2 else tensor
    if tensor.ndim != 1 or not len(tensor) or tensor.is_floating_point() or tensor.is_complex():
        raise RefusedFile("other shapes", f"{name}: {tensor.dtype} {list(tensor.shape)}")
    return tensor.to(torch.int64)


def _mask(data: dict[str, Any]) -> torch.Tensor:
    mask = _row(data["loss_mask"], "loss_mask").bool()
    if len(mask) != len(_row(data["input_ids"], "input_ids")):
        raise RefusedFile("other shapes", "loss_mask is not as long as input_ids")
    return mask
