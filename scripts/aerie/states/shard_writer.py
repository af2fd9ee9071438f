"""Writing a shard: check the samples, pack them one by one, read the result back."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from aerie.common import versions
from aerie.common.errors import UnusableStates
from aerie.common.files import atomic_write
from aerie.states import codec
from aerie.states.checks import check_states
from aerie.states.codec import bits_of
from aerie.states.convention import Convention
from aerie.states.ids import LossMask, sample_key
from aerie.states.kernels import Positions
from aerie.states.shard import Sample, SampleEntry, Shard, metadata_checksum


def write_shard_file(
    path: Path,
    convention: Convention,
    samples: list[Sample],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Check samples and write them to `path`, whose stem is the shard's id.

    The file gets its name only after it was opened and its first sample read back. `beat` is
    called for each sample that was packed. Raises `UnusableStates` for states that fail
    `check_states`, and for two samples of different tokens with the same states.
    """
    supervised = convention.last_state == "supervised"
    for sample in samples:
        mask = sample.loss_mask if supervised else None
        check_states(sample.states, sample.tokens, convention, mask, sample.fp8 is not None)
        if supervised and (mask is None or len(mask) != len(sample.tokens)):
            raise ValueError(f"sample {sample.id}: the loss mask has another length")
    samples = [_as_stored(s, convention) for s in samples]
    masks = [s.loss_mask if supervised else None for s in samples]
    stored = [
        codec.rows_by_layer(len(s.tokens), len(convention.layer_ids), mask)
        for s, mask in zip(samples, masks, strict=True)
    ]
    index = [_entry(s, mask) for s, mask in zip(samples, masks, strict=True)]
    first: dict[str, SampleEntry] = {}
    for entry in index:
        twin = first.setdefault(entry["checksum"], entry)
        if twin["key"] != entry["key"]:
            raise UnusableStates(f"samples {twin['id']} and {entry['id']} have the same states")
    metadata = {
        "aerie": str(versions.SHARD_VERSION),
        "shard": path.stem,
        "format": convention.format,
        "layer_ids": json.dumps(list(convention.layer_ids)),
        "last_state": convention.last_state,
        "last_layer": "before the final norm",
        "hidden_size": str(convention.hidden_size),
        "verifier": convention.fingerprint,
        "tokenizer": convention.tokenizer,
        "samples": json.dumps(index),
    }
    metadata["checksum"] = metadata_checksum(metadata)
    with atomic_write(path) as temporary:
        with temporary.open("wb") as raw:
            file = _TensorFile(raw, metadata, tensors=4 * len(samples) + 1)
            _write_tensors(file, convention.format, samples, stored, beat)
            file.finish()
        with Shard(temporary) as written:
            written.read(0)


def _entry(sample: Sample, mask: LossMask | None) -> SampleEntry:
    entry: SampleEntry = {
        "id": sample.id,
        "key": sample_key(sample.tokens.tolist(), mask),
        "tokens": len(sample.tokens),
        "checksum": codec.checksum(sample.states),
    }
    if mask is not None:
        edges = np.flatnonzero(np.diff(np.asarray(mask, dtype=np.int8), prepend=0, append=0))
        entry["last_rows"] = edges.reshape(-1, 2).tolist()
    return entry


def _as_stored(sample: Sample, convention: Convention) -> Sample:
    """The sample as it will be read: rows that are not stored are zero, fp8 is rounded."""
    states, fp8 = sample.states, sample.fp8
    if convention.last_state == "supervised":
        states = states.clone()
        states[~torch.as_tensor(np.asarray(sample.loss_mask, dtype=bool)), -1] = 0
    if convention.format == "fp8":
        rounded, fp8 = codec.round_fp8(bits_of(states), fp8)
        states = torch.from_numpy(rounded).view(torch.bfloat16)
    return replace(sample, states=states, fp8=fp8)


def _write_tensors(
    file: "_TensorFile",
    form: str,
    samples: list[Sample],
    stored: list[list[Positions]],
    beat: Callable[[], None],
) -> None:
    for number, sample in enumerate(samples):
        tokens = sample.tokens.numpy().astype("<i4")
        file.add(f"{number:06d}.tokens", "I32", tokens.shape, tokens)
    if form == "lossless":
        base, means = codec.exponent_base(
            [(bits_of(s.states), rows) for s, rows in zip(samples, stored, strict=True)]
        )
        file.add("base", "U8", base.shape, base)
    for number, (sample, rows) in enumerate(zip(samples, stored, strict=True)):
        name = f"{number:06d}"
        if form == "raw":
            bits = bits_of(sample.states)
            data = np.concatenate([bits[r, k] for k, r in enumerate(rows)])
            file.add(f"{name}.states", "BF16", data.shape, data)
        elif form == "fp8":
            assert sample.fp8 is not None
            frame = codec.pack_fp8(*sample.fp8, rows)
            file.add(f"{name}.fp8", "U8", (len(frame),), frame)
        else:
            high, low, rest = codec.pack(bits_of(sample.states), rows, base, means)
            file.add(f"{name}.exponents", "U8", (len(high),), high)
            file.add(f"{name}.low", "U8", (len(low),), low)
            file.add(f"{name}.rest", "U8", rest.shape, rest)
        beat()


class _TensorFile:
    """Writes a safetensors file tensor by tensor, so that only one is in memory.

    The header comes first but is written last; `metadata` and the number of `tensors` bound its
    size. The rest of its room is blanks, as the format allows.
    """

    def __init__(self, file: BinaryIO, metadata: dict[str, str], tensors: int):
        self.file = file
        self.header: dict[str, Any] = {"__metadata__": metadata}
        self.room = (len(json.dumps(self.header)) + 120 * tensors + 7) // 8 * 8
        self.end = 0
        file.seek(8 + self.room)

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], data: bytes | npt.NDArray[Any]
    ) -> None:
        view = memoryview(data) if isinstance(data, bytes) else data.data
        start, self.end = self.end, self.end + view.nbytes
        self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, self.end]}
        self.file.write(view)

    def finish(self) -> None:
        text = json.dumps(self.header, separators=(",", ":")).encode()
        assert len(text) <= self.room
        self.file.seek(0)
        self.file.write(struct.pack("<Q", self.room) + text.ljust(self.room))
