"""Shards: one safetensors file with the states of many samples, described in docs/formats.md.

A shard's name is a hash of all that determines its content. So it exists or it does not; it is
never stale.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import torch
import xxhash
import zstandard

from aerie.common import versions
from aerie.common.errors import AerieError, InputError, UnusableStates
from aerie.states import codec
from aerie.states.convention import Convention
from aerie.states.ids import LossMask, sample_key
from aerie.states.kernels import Bytes, Floats

WIDTHS = {"U8": 1, "BF16": 2, "I32": 4}
"""Bytes a value of the types in a shard, by safetensors' names."""

# Errors of opening or reading that condemn the file itself, such as a bad sector (EIO).
_NO_SHARD = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)

# What parsing raises for bytes that are not a shard's.
_UNREADABLE = (ValueError, TypeError, AttributeError, RecursionError, zstandard.ZstdError)


@dataclass
class Sample:
    """One sample of a shard: `tokens` int64 [T], `states` bf16 [T, ids, hidden].

    `loss_mask` bool [T]: needed by the convention `last_state: supervised`, which keeps the last
    layer's states where it is set; elsewhere they are read as zero. `fp8`: the codes and scales
    of an fp8 shard, so that a copy of the sample is not rounded again.
    """

    id: str
    tokens: torch.Tensor
    states: torch.Tensor
    loss_mask: LossMask | None = None
    fp8: tuple[Bytes, Floats] | None = None


class SampleEntry(TypedDict):
    """A sample in a shard's index. `checksum`: of its states; `last_rows`: [start, end) of each
    run of positions whose last state is stored, with `last_state: supervised` only."""

    id: str
    key: str
    tokens: int
    checksum: str
    last_rows: NotRequired[list[list[int]]]


def metadata_checksum(metadata: dict[str, str]) -> str:
    """xxh3 of a shard's metadata, the entry `checksum` left out."""
    text = "\n".join(f"{k}={v}" for k, v in sorted(metadata.items()) if k != "checksum")
    return xxhash.xxh3_64_hexdigest(text.encode())


class Shard:
    """An open shard file. `samples`: its index; `name`: the id it was written under; `size`:
    bytes of the file.

    Raises `UnusableStates` for a file that is absent, cut, damaged or another tool's;
    `InputError` when its states cannot be judged: another version of the format, or a file that
    cannot be read at the moment.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        with self._refusing("not a whole shard: "):
            self._file = self.path.open("rb", buffering=0)
        try:
            with self._refusing("not a whole shard: "):
                self._read_header()
        except AerieError:
            self._file.close()
            raise

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Turn what reading raises into `UnusableStates`; into `InputError` where the file is not
        at fault (permissions, open files, a server), so that it is not moved aside."""
        try:
            yield
        except OSError as error:
            text = error.strerror or str(error)
            if error.errno not in _NO_SHARD:
                raise InputError(
                    f"{self.path}: cannot be read ({text}); its states may be fine. Fix the "
                    "cause and run again"
                ) from error
            raise UnusableStates(f"{self.path}: {what}{text}") from error
        except KeyError as error:
            raise UnusableStates(f"{self.path}: {what}it has no {error}") from error
        except _UNREADABLE as error:
            raise UnusableStates(f"{self.path}: {what}{error}") from error

    def _read_header(self) -> None:
        size = self.size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise ValueError(f"{size} bytes, less than the length of a header")
        room = int(self._read(0, 8).view("<u8")[0])
        if room > size - 8:
            raise ValueError(f"{size} bytes, and its header alone should have {room}")
        header = json.loads(self._read(8, room).tobytes())
        meta = header.pop("__metadata__", {})
        found = meta.get("aerie")
        if found is None:
            raise ValueError("another tool's safetensors file, without Aerie's metadata")
        ours = {**meta, "aerie": str(versions.SHARD_VERSION)}
        another = found.isdecimal() and len(found) < 6 and meta != ours
        if another and meta.get("checksum") != metadata_checksum(ours):  # else a flipped digit
            raise InputError(
                f"{self.path}: a shard of format version {found}, and this Aerie reads version "
                f"{versions.SHARD_VERSION} only. The next run makes its states again; then "
                "`scripts/store.py gc` collects the file"
            )
        if meta["checksum"] != metadata_checksum(meta):
            raise ValueError("its metadata do not match their checksum")
        self._places: dict[str, list[int]] = {}
        for name, entry in header.items():
            start, end = self._places[name] = entry["data_offsets"]
            if start < 0 or end - start != WIDTHS[entry["dtype"]] * math.prod(entry["shape"]):
                raise ValueError(f"tensor {name} has another size than its shape")
        if 8 + room + max(end for _, end in self._places.values()) != size:
            raise ValueError(f"{size} bytes, which is not what its header says")
        self._data = 8 + room
        self.name = meta["shard"]
        self.format = meta["format"]
        self.last_state = meta["last_state"]
        self.tokenizer = meta["tokenizer"]
        self.layer_ids = tuple(json.loads(meta["layer_ids"]))
        self.hidden_size = int(meta["hidden_size"])
        self.fingerprint = meta["verifier"]
        self.samples: list[SampleEntry] = json.loads(meta["samples"])
        if self.format == "lossless":
            shape = (len(self.layer_ids), self.hidden_size)
            self._base = self._bytes(["base"]).reshape(shape).copy()

    def _read(self, start: int, size: int) -> Bytes:
        """Bytes of the file in a buffer of this thread. A call reads at most 2 GiB."""
        if size < 0:
            raise ValueError("its tensors do not lie in order")
        buffer, done = codec.scratch("file", size), 0
        while done < size:
            count = os.preadv(self._file.fileno(), [buffer[done:].data], start + done)
            if not count:
                raise ValueError("the file is cut short")
            done += count
        return buffer

    def _bytes(self, names: list[str]) -> Bytes:
        """Bytes of adjacent tensors, in a buffer of this thread."""
        start, end = self._places[names[0]][0], self._places[names[-1]][1]
        return self._read(self._data + start, end - start)

    @property
    def convention(self) -> Convention:
        return Convention(
            self.fingerprint,
            self.layer_ids,
            self.hidden_size,
            self.format,
            self.last_state,
            self.tokenizer,
        )

    def read(self, number: int) -> Sample:
        """The sample at this position, decoded and compared with its checksum."""
        entry = self.samples[number]
        with self._refusing(f"sample {entry['id']} cannot be read: "):
            sample = self._decode(f"{number:06d}", entry)
        key = sample_key(sample.tokens.tolist(), sample.loss_mask)
        if codec.checksum(sample.states) != entry["checksum"] or key != entry["key"]:
            raise UnusableStates(f"{self.path}: sample {entry['id']} does not match its checksum")
        return sample

    def _decode(self, name: str, entry: SampleEntry) -> Sample:
        length, layers, width = entry["tokens"], len(self.layer_ids), self.hidden_size
        mask: npt.NDArray[np.bool_] | None = None
        if self.last_state == "supervised":
            mask = np.zeros(length, dtype=bool)
            for start, end in entry["last_rows"]:
                mask[start:end] = True
        rows = codec.rows_by_layer(length, layers, mask)
        tokens = self._bytes([f"{name}.tokens"]).view("<i4").astype(np.int64)
        if len(tokens) != length:
            raise ValueError(f"{len(tokens)} tokens, the index says {length}")
        bits = np.empty((length, layers, width), np.uint16)
        fp8 = None
        if mask is not None:
            bits[~mask, -1] = 0
        if self.format == "raw":
            values = self._bytes([f"{name}.states"]).view(np.uint16).reshape(-1, width)
            for k, part in enumerate(codec.layer_slices(rows)):
                bits[rows[k], k] = values[part]
        elif self.format == "fp8":
            fp8 = codec.unpack_fp8(self._bytes([f"{name}.fp8"]), rows, bits)
        else:
            names = [f"{name}.exponents", f"{name}.low", f"{name}.rest"]
            data = self._bytes(names)
            ends = np.cumsum([np.diff(self._places[n])[0] for n in names])
            codec.unpack(np.split(data, ends[:2]), rows, self._base, bits)
        states = torch.from_numpy(bits).view(torch.bfloat16)
        return Sample(entry["id"], torch.from_numpy(tokens), states, mask, fp8)

    def omitted_bytes(self) -> int:
        """Bytes of the last layer's bf16 states that are not stored, where no loss is taken."""
        if self.last_state == "all":
            return 0
        kept = sum(end - start for s in self.samples for start, end in s["last_rows"])
        return 2 * self.hidden_size * (sum(s["tokens"] for s in self.samples) - kept)

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
