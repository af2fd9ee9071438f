"""Hidden states from and for other trainers: speculators' and SpecForge's files.

Read are speculators' `hs_*.safetensors` (`token_ids` [T], `hidden_states` [T, ids, hidden]), its
older `.pt` files (`input_ids` [T], `loss_mask` [T], `hidden_states`: list of [T, hidden], or
[T, ids, hidden]) and SpecForge's `.ckpt` (`input_ids` [T], `loss_mask` [T], `aux_hidden_state`
[1, T, aux x hidden], `hidden_state` [1, T, hidden], the last one after the final norm); written
are the first and the last. Sources: speculators 0.9.0 `train/data.py`, hs-connectors 0.9.0
`transfer.py`, SpecForge `scripts/prepare_hidden_states.py` and `specforge/data/preprocessing.py`.

Files of others are data, never code: pickles are read with `weights_only`.
"""

import gzip
import io
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aerie.common.errors import InputError, UnusableStates
from aerie.common.files import atomic_write, digest, read_json, write_json
from aerie.maintenance.verify import IMPORTS, Named, read_named, read_run
from aerie.samples.tokenize import TokenizedSample, read_samples
from aerie.states.shard import (
    Convention,
    Sample,
    Shard,
    Store,
    Teacher,
    check_states,
    checksum,
    file_checksum,
    sample_key,
    shard_id,
)
from aerie.verifier.compatibility import resolve_layer_ids

SHARD_BYTES = 1 << 30
"""Uncompressed bytes after which an imported shard ends."""

TWINS = "the same states as another file's of other tokens"

FILES_A_FOLDER = 5000
"""As SpecForge groups its files."""

BESIDE = re.compile(r"aerie\.json|dataset_info\.json|state\.json|data-\d+-of-\d+\.arrow")
"""Names of the files that an export has beside its samples; `masks_of` reads the data set."""


class Unusable(Exception):
    """A file that cannot be imported: `reason` to count it under, and what exactly is wrong."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


# The final norm


def final_norm(last: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """States after the verifier's final RMS norm: bf16 [T, hidden], computed in float32."""
    return teacher.normed(last).to(torch.bfloat16)


def _mean_square(last: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """Mean square of states divided by the norm's weight, [T]: 1 after the final norm.

    RMS norm makes the mean square of x / rms(x) one; dividing by the weight gives that back. A
    residual stream has any other.
    """
    return (last.float() / teacher.norm).pow(2).mean(-1)


def undo_final_norm(last: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """A state before the final norm that leads to the same logits: bf16 [T, hidden].

    The norm loses the length of the state; its direction is had by dividing by the weight. What
    comes out has length sqrt(hidden), and norming it again gives the input up to bf16 rounding.
    Nothing else is asked of the last state: training uses it as lm_head(final_norm(h[n])) only.
    Raises `Unusable` for states that are not after the final norm.
    """
    if bool((teacher.norm == 0).any()):
        raise Unusable("the final norm cannot be undone", "some of its weights are zero")
    off = (_mean_square(last, teacher) - 1).abs().max().item()
    if off > 0.02:
        raise Unusable(
            "last states are not after the final norm",
            f"mean square of state / weight is up to {off:.2g} away from 1; "
            "expected --last-state before, another layer, or another verifier",
        )
    return (last.float() / teacher.norm).to(torch.bfloat16)


def _refuse_normed(last: torch.Tensor, teacher: Teacher) -> None:
    """Raise `Unusable` for states after the final norm that are said to be before it."""
    off = (_mean_square(last, teacher) - 1).abs()
    if len(last) >= 4 and bool((off < 0.02).all()):
        raise Unusable(
            "last states are after the final norm",
            "mean square of state / weight is 1 at every token; expected --last-state after-norm",
        )


# Reading others' files


@dataclass
class Foreign:
    """One sample of another tool: `tokens` int64 [T], `states` [T, ids, hidden] in the file's
    order, `mask` bool [T] or None where the file has none."""

    tokens: torch.Tensor
    states: torch.Tensor
    mask: torch.Tensor | None


def read_tokens(path: Path, vocab_size: int) -> torch.Tensor:
    """Token ids int64 [T] of a file, its states unread; `Unusable` says what is wrong."""
    if path.name.endswith(".safetensors"):
        tokens = _row(_read_hs(path, "token_ids"), "token_ids")
    else:
        data = _load_pickle(path)
        _need(data, "input_ids")
        tokens = _row(data["input_ids"], "input_ids")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise Unusable("token ids outside the verifier's vocabulary")
    return tokens


def read_foreign(path: Path) -> Foreign:
    """Read one file of any known layout; `Unusable` says why it cannot be used."""
    if path.name.endswith(".safetensors"):
        tokens = _row(_read_hs(path, "token_ids"), "token_ids")
        return Foreign(tokens, _read_hs(path, "hidden_states"), None)
    data = _load_pickle(path)
    return _from_pt(data) if path.name.endswith(".pt") else _from_ckpt(data)


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of known layouts under `folder` in the order of their numbers, and the others.

    What an export has beside its samples is neither.
    """
    known, others = [], []
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
                raise Unusable("quantised to fp8", "expected bf16 states")
            if not {"token_ids", "hidden_states"} <= names:
                raise Unusable("other content", f"found tensors {sorted(names)[:6]}")
            return file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise Unusable("not readable", str(error)) from None


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
            raise Unusable("pickle holds more than tensors", text) from None
        raise Unusable("not readable", text) from None
    if not isinstance(data, dict):
        raise Unusable("other content", f"found {type(data).__name__}, expected a dict")
    return data


def _from_pt(data: dict[str, Any]) -> Foreign:
    _need(data, "input_ids", "loss_mask", "hidden_states")
    states = data["hidden_states"]
    if isinstance(states, (list, tuple)):
        parts = [_plain(s, "hidden_states") for s in states]
        if not parts or any(p.ndim != 2 or p.shape != parts[0].shape for p in parts):
            raise Unusable("other shapes", f"hidden_states: {[list(p.shape) for p in parts]}")
        states = torch.stack(parts, 1)
    return Foreign(
        _row(data["input_ids"], "input_ids"), _plain(states, "hidden_states"), _mask(data)
    )


def _from_ckpt(data: dict[str, Any]) -> Foreign:
    _need(data, "input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
    last = _plain(data["hidden_state"], "hidden_state")
    aux = _plain(data["aux_hidden_state"], "aux_hidden_state")
    last = last.squeeze(0) if last.ndim == 3 else last
    aux = aux.squeeze(0) if aux.ndim == 3 else aux
    if last.ndim != 2 or aux.ndim != 2 or len(last) != len(aux) or aux.shape[1] % last.shape[1]:
        raise Unusable(
            "other shapes",
            f"hidden_state {list(last.shape)}, aux_hidden_state {list(aux.shape)}",
        )
    states = torch.cat([aux.reshape(len(aux), -1, last.shape[1]), last[:, None]], 1)
    return Foreign(_row(data["input_ids"], "input_ids"), states, _mask(data))


def _need(data: dict[str, Any], *names: str) -> None:
    missing = [n for n in names if data.get(n) is None]
    if missing:
        raise Unusable(
            "other content", f"keys {missing} are missing, found {sorted(map(str, data))}"
        )


def _plain(value: Any, name: str) -> torch.Tensor:
    """A dense tensor that is as large as the memory behind it says."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise Unusable("other content", f"{name} is no dense tensor")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise Unusable("other content", f"{name} is larger than what the file holds")
    return value


def _row(value: Any, name: str) -> torch.Tensor:
    """int64 [T] of a tensor [T] or [1, T] of whole numbers."""
    tensor = _plain(value, name)
    tensor = tensor.squeeze(0) if tensor.ndim == 2 else tensor
    if tensor.ndim != 1 or not len(tensor) or tensor.is_floating_point() or tensor.is_complex():
        raise Unusable("other shapes", f"{name}: {tensor.dtype} {list(tensor.shape)}")
    return tensor.to(torch.int64)


def _mask(data: dict[str, Any]) -> torch.Tensor:
    mask = _row(data["loss_mask"], "loss_mask").bool()
    if len(mask) != len(_row(data["input_ids"], "input_ids")):
        raise Unusable("other shapes", "loss_mask is not as long as input_ids")
    return mask


# Importing


@dataclass(frozen=True)
class Stated:
    """What the user says of others' files. `layer_ids` in our counting, the number of layers
    last; `after_norm`: whether the last state is after the final norm; `greedy`: whether the
    supervised tokens are the verifier's own greedy choice."""

    layer_ids: tuple[int, ...]
    after_norm: bool
    greedy: bool

    @classmethod
    def of(
        cls, layer_ids: list[int], counting: str, num_layers: int, last_state: str, answers: str
    ) -> "Stated":
        """From the command line. `layer_ids`: those that feed the drafter, in the file's order.

        `counting`: `entering` (k is the state entering layer k) or `output` (k is the output of
        layer k, our k+1: SGLang, SpecForge, TorchSpec). Raises `InputError`.
        """
        ours = [k + 1 for k in layer_ids] if counting == "output" else list(layer_ids)
        if ours != sorted(set(ours)):
            raise InputError(f"--layer-ids: found {layer_ids}, expected distinct ids in order")
        try:
            resolved = resolve_layer_ids(ours, num_layers)
        except InputError as error:
            raise InputError(
                f"--layer-ids {layer_ids} counted by {counting} are {ours} in Aerie's counting; "
                f"{error}"
            ) from None
        return cls(tuple(resolved), last_state == "after-norm", answers == "greedy")


@dataclass
class Imported:
    """What became of the files: counts, and the reason for each that was refused."""

    samples: int = 0
    tokens: int = 0
    present: int = 0
    rounded: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def refuse(self, name: str, error: Unusable) -> None:
        self.refused[name] = str(error)
        self.reasons[error.reason] += 1


def import_files(
    files: list[Path],
    names: list[str],
    store: Store,
    teacher: Teacher,
    stated: Stated,
    masks: Callable[[str], np.ndarray | None],
    written: Callable[[Imported], object],
    progress: Callable[[int, str], None],
) -> Imported:
    """Write others' files as shards of the store's convention.

    Extraction finds a sample by its tokens in any shard of the convention, so the next run with
    these samples copies them. Those that the store holds already are left alone. `names`: what
    the files are called in the report; `masks`: the loss mask of a sample key, for files that
    have none; `written` is called for every shard, so that a manifest names it before the next
    one. A file that fails a check is counted and left where it is.
    """
    done = Imported()
    keys: dict[int, str] = {}
    for number, path in enumerate(files):
        try:
            keys[number] = sample_key(read_tokens(path, len(teacher.head)).tolist())
        except Unusable as error:
            done.refuse(names[number], error)
    found = store.find_samples(set(keys.values()))
    present = [(files[n], found[k]) for n, k in keys.items() if k in found]
    _compare(present[:8], stated)
    done.shards = [_entry(p) for p in _unnamed(store, {p for p, _ in found.values()})]
    taken: set[str] = set()
    waiting: list[Sample] = []
    first: dict[str, str] = {}

    def flush() -> None:
        if waiting:
            shard = shard_id(sample_key(s.tokens.tolist()) for s in waiting)
            done.shards.append(_entry(store.write(shard, waiting)))
            done.samples += len(waiting)
            done.tokens += sum(len(s.tokens) for s in waiting)
            waiting.clear()
            written(done)

    for number, path in enumerate(files):
        key = keys.get(number)
        if key in found:
            done.present += 1
        elif key in taken:
            done.refuse(names[number], Unusable("the same tokens as an earlier file"))
        elif key is not None:
            try:
                foreign = read_foreign(path)
                states = _checked(foreign, masks(key), store.convention, teacher, stated)
                twin = first.setdefault(checksum(states), names[number])
                if twin != names[number]:
                    # One of them is wrong; which, cannot be seen.
                    for other in [s for s in waiting if s.id == twin]:
                        waiting.remove(other)
                        done.refuse(twin, Unusable(TWINS, names[number]))
                    raise Unusable(TWINS, twin)
                done.rounded += foreign.states.dtype != torch.bfloat16
                waiting.append(Sample(names[number], foreign.tokens, states))
                taken.add(key)
            except Unusable as error:
                done.refuse(names[number], error)
        if sum(s.states.nbytes for s in waiting) >= SHARD_BYTES:
            flush()
        progress(number + 1, f"{len(done.refused)} refused")
    flush()
    return done


def _entry(path: Path) -> dict[str, Any]:
    """What a manifest says of this shard."""
    with Shard(path) as shard:
        return {
            "id": path.stem,
            "file": path.name,
            "samples": [s["id"] for s in shard.samples],
            "tokens": sum(s["tokens"] for s in shard.samples),
            "bytes": path.stat().st_size,
            "checksum": file_checksum(path),
        }


def _unnamed(store: Store, paths: set[Path]) -> list[Path]:
    """Those of an import that was killed before a manifest named them."""
    named = read_named(store.folder.parents[1], []).shards
    return sorted(
        p
        for p in paths
        if (store.convention.key, p.stem) not in named and not p.with_suffix(".json").exists()
    )


def _compare(present: list[tuple[Path, tuple[Path, int]]], stated: Stated) -> None:
    """Raise `InputError` when states differ from those that the store has of the same tokens.

    The head proves the last layer only; this proves the others, where there is something to
    compare with. Two engines differ by a few percent in bf16, neighbouring layers by far more.
    """
    for file, (path, number) in present:
        try:
            theirs = read_foreign(file).states.float()
        except Unusable:
            continue
        with Shard(path) as shard:
            ours = shard.read(number).states.float()
        layers = len(stated.layer_ids) - stated.after_norm
        if theirs.shape != ours.shape:
            continue
        theirs, ours = theirs[:, :layers], ours[:, :layers]
        error = (theirs - ours).norm(dim=(0, 2)) / ours.norm(dim=(0, 2))
        wrong = (error > 0.1).tolist()
        if any(wrong):
            # The last state is the same one however the layers are counted.
            fed = len(stated.layer_ids) - 1
            options = ["--layer-ids", "--counting"] * any(wrong[:fed])
            options += ["--last-state"] * any(wrong[fed:])
            found = ", ".join(
                f"{i}: {e:.0%}" for i, e in zip(stated.layer_ids, error.tolist(), strict=False)
            )
            raise InputError(
                f"{file}: the store has states of the same tokens, and these differ by layer "
                f"({found}); check {' and '.join(options)}"
            )


def _checked(
    foreign: Foreign,
    mask: np.ndarray | None,
    convention: Convention,
    teacher: Teacher,
    stated: Stated,
) -> torch.Tensor:
    """The states as the store keeps them, bf16 [T, ids, hidden]; `Unusable` when not right."""
    tokens, states = foreign.tokens, _plain(foreign.states, "states")
    if states.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Unusable("other number format", str(states.dtype))
    wanted = (len(tokens), len(convention.layer_ids), convention.hidden_size)
    if tuple(states.shape) != wanted:
        raise Unusable("other shapes", f"states {list(states.shape)}, expected {list(wanted)}")
    states = states.to(torch.bfloat16)
    if not torch.isfinite(states).all():
        raise Unusable("states hold NaN or infinity")
    if stated.after_norm:
        last = undo_final_norm(states[:, -1], teacher)
        states = torch.cat([states[:, :-1], last[:, None]], 1)
    else:
        _refuse_normed(states[:, -1], teacher)
    states = states.contiguous()
    try:
        check_states(states, tokens, convention)
    except UnusableStates as error:
        raise Unusable("states cannot be those of the tokens", str(error)) from None
    if mask is None and foreign.mask is not None:
        mask = foreign.mask.numpy()
    if mask is not None and len(mask) != len(tokens):
        raise Unusable("loss mask of another length", f"{len(mask)} of {len(tokens)} tokens")
    if mask is None and stated.greedy:
        raise Unusable(
            "no loss mask",
            "which tokens the verifier chose is not known; give the --run that has these samples, "
            "or --answers other",
        )
    chosen = np.ones(len(tokens) - 1, bool) if mask is None else np.asarray(mask, bool)[1:]
    positions = torch.from_numpy(np.flatnonzero(chosen))
    try:
        teacher.check(states[positions], tokens[positions + 1].tolist(), stated.greedy)
    except UnusableStates as error:
        raise Unusable("the verifier's head does not lead to the next tokens", str(error)) from None
    return states


def write_import(root: Path, source: Path, store: Store, stated: Stated, done: Imported) -> Path:
    """Write the manifest that names the shards imported from this folder, also before, so that
    nothing collects them."""
    c = store.convention
    name = digest(c.key, str(source.resolve()), stated.after_norm)[:16]
    path = root / IMPORTS / f"{name}.json"
    new = {s["id"] for s in done.shards}
    before = read_json(path)["shards"] if path.exists() else []
    shards = [s for s in before if s["id"] not in new and store.has(s["id"])] + done.shards
    write_json(
        path,
        {
            "convention": {
                **c.as_json(),
                "last_state": "before the final norm, "
                + ("its length lost" if stated.after_norm else "as it was"),
            },
            "source": str(source),
            "shards": shards,
            "samples": sum(len(s["samples"]) for s in shards),
            "tokens": sum(s["tokens"] for s in shards),
            "refused": done.refused,
        },
    )
    return path


def masks_of(run: Path, folder: Path) -> Callable[[str], np.ndarray | None]:
    """Loss masks by sample key: of a run's samples, else of the data set around `folder`.

    speculators keeps the masks in an Arrow data set in the folder above `hidden_states`.
    """
    known: dict[str, np.ndarray] = {}
    for place in (folder, folder.parent):
        if (place / "dataset_info.json").is_file():
            from datasets import load_from_disk

            try:
                for row in load_from_disk(str(place)).with_format(None):
                    known[sample_key(row["input_ids"])] = np.asarray(row["loss_mask"], bool)
            except Exception as error:  # whatever its readers raise
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


# Exporting


@dataclass
class Source:
    """What a run trains on: `places` by split, each a row, its shard and its number there."""

    convention: dict[str, Any]
    places: list[tuple[TokenizedSample, Path, int]]
    train: int

    @property
    def tokens(self) -> int:
        return sum(len(row.input_ids) for row, _, _ in self.places)

    def samples(self) -> Iterator[tuple[int, TokenizedSample, Sample]]:
        """All samples, training's first, with their numbers."""
        shard: Shard | None = None
        for number, (row, path, position) in enumerate(self.places):
            if shard is None or shard.path != path:
                shard = Shard(path)
            sample = shard.read(position)
            if sample.tokens.tolist() != row.input_ids:
                raise InputError(
                    f"{path}: sample {row.id} holds other tokens than the run's samples.parquet; "
                    "start the run again"
                )
            yield number, row, sample


def read_source(run: Path, store: Path) -> Source:
    """The samples of a finished extraction; `InputError` when there is none."""
    rows = read_samples(run / "samples/samples.parquet")
    named = Named()
    read_run(run, named)
    for path, error in named.unreadable.items():
        raise InputError(f"{path}: {error}; delete it and start the run again")
    for reason in named.unfinished.values():
        raise InputError(f"{run}: {reason}; finish the run first")
    wanted = [s["id"] for s in read_json(run / "samples/shards.json")["shards"]]
    # Of a run that had other layers, or more lanes, manifests are left that nothing reads any more.
    first = read_json(run / "hidden_states/lane-0.json")["convention"]
    places: dict[str, list[tuple[TokenizedSample, Path, int]]] = {"train": [], "heldout": []}
    for identity in wanted:
        for naming in named.shards.get((first["key"], identity), [])[:1]:
            path = store / "hidden_states" / first["key"] / naming.entry["file"]
            for position, sample in enumerate(naming.entry["samples"]):
                row = rows.get(sample)
                if row is None:
                    raise InputError(
                        f"{run}: the lanes' manifests name sample {sample}, samples.parquet does "
                        "not; finish the run first"
                    )
                places[row.split].append((row, path, position))
    return Source(first, places["train"] + places["heldout"], len(places["train"]))


def prepare_folder(folder: Path, source: Source) -> None:
    """Make the empty folder to export to; `InputError` when it is not, or the disk too small."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file; expected the name of a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: not empty; an export is written whole, into a new folder")
    c = source.convention
    needed = source.tokens * len(c["layer_ids"]) * c["hidden_size"] * 2
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder}: the export takes {needed / 1e9:.1f} GB uncompressed, {free / 1e9:.1f} GB "
            "are free"
        )


def describe_files(source: Source, to: str) -> dict[str, Any]:
    """What the files of an export hold, in the words of `store.py import`.

    SpecForge's hold the last state after the final norm, and it names a layer by its output.
    """
    c = source.convention
    ids = c["layer_ids"][:-1]
    if to == "specforge":
        return {
            "layer_ids": [k - 1 for k in ids],
            "counting": "output",
            "last_state": "after-norm",
            "meaning": "id k is the output of layer k; that of the last one, which has no id "
            "here, is after the final norm",
        }
    supervised = c.get("last_state") == "supervised"
    return {
        "layer_ids": ids,
        "counting": "entering",
        "last_state": "before",
        "meaning": "id k is the state entering layer k; the output of the last one, which has "
        "no id here, is before the final norm" + ", zero where no loss is taken" * supervised,
    }


def export_speculators(source: Source, folder: Path, progress: Callable[[int], None]) -> None:
    """A data path of speculators: Arrow data set and `hidden_states/hs_<row>.safetensors`.

    The data set is written last: without it the folder is not taken for whole.
    """
    from datasets import Dataset

    for number, _, sample in source.samples():
        with atomic_write(folder / "hidden_states" / f"hs_{number}.safetensors") as temporary:
            save_file(
                {"hidden_states": sample.states.contiguous(), "token_ids": sample.tokens},
                temporary,
            )
        progress(number + 1)
    rows = [row for row, _, _ in source.places]
    dataset = Dataset.from_dict(
        {
            "input_ids": [row.input_ids for row in rows],
            "loss_mask": [[int(m) for m in row.loss_mask] for row in rows],
            "seq_len": [len(row.input_ids) for row in rows],
        }
    )
    dataset.set_format(type="torch")
    dataset.save_to_disk(str(folder))


def export_specforge(
    source: Source, folder: Path, teacher: Teacher, progress: Callable[[int], None]
) -> None:
    """SpecForge's offline files, `rows_<a>-<b>/data_<row>.ckpt` under `train` and `heldout`.

    The last state is written after the final norm, as SpecForge's target head takes it. Raises
    `InputError` where the store left out rows of the last layer: SpecForge looks at others.
    """
    for number, row, sample in source.samples():
        last = sample.states[:, -1]
        if bool((last == 0).all(-1).any()):
            raise InputError(
                f"sample {row.id}: rows of the last layer were left out of the store "
                "(hidden_states.last_state); SpecForge needs them all, extract without that"
            )
        first = number if row.split == "train" else number - source.train
        group = first - first % FILES_A_FOLDER
        place = folder / row.split / f"rows_{group}-{group + FILES_A_FOLDER}"
        with atomic_write(place / f"data_{first}.ckpt") as temporary:
            torch.save(
                {
                    "input_ids": sample.tokens,
                    "loss_mask": torch.tensor(row.loss_mask, dtype=torch.int64),
                    "hidden_state": final_norm(last, teacher)[None],
                    "aux_hidden_state": sample.states[:, :-1].flatten(1)[None].contiguous(),
                },
                temporary,
            )
        progress(number + 1)
