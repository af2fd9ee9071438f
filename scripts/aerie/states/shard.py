"""Shards of hidden states: their format, the checks before a shard has its name, the store.

A shard is one safetensors file with the states of many samples, described in docs/formats.md.
It lies under a name made of everything that determines it, so it exists or it does not: it is
never stale. It is written to a temporary name, checked, synced and renamed.
"""

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
import zstandard

from aerie.common.errors import AerieError, InputError, UnusableStates
from aerie.common.files import atomic_write, digest
from aerie.common.machine import processor_computes_bf16
from aerie.common.versions import SHARD_VERSION
from aerie.states import kernels as planes

FORMATS = ("lossless", "raw", "fp8")
LAST_STATES = ("all", "supervised")

QUARANTINE = "damaged"

# Bytes of a value of the types in a shard, by safetensors' names.
WIDTHS = {"U8": 1, "BF16": 2, "I32": 4}

# What a float8_e4m3fn code stands for.
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()

# Huffman coding of literals and next to no search for matches, which hidden states do not hold:
# faster and smaller than any level (benchmarks/pack_states.py).
ZSTD = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
)


# What opening or reading says of a file that is none, or is damaged itself (a bad sector: EIO).
_NO_SHARD = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)

# What parsing raises of bytes that are no shard's.
_UNREADABLE = (ValueError, TypeError, AttributeError, RecursionError, zstandard.ZstdError)


@dataclass(frozen=True)
class Convention:
    """What determines the states of given tokens, and how they are stored.

    `fingerprint`: of the verifier, which covers that of its tokenizer, `tokenizer`. `layer_ids`:
    sorted, the number of layers last (the last layer's output before the final norm). `format`:
    `lossless`, `raw` or `fp8`. `last_state`: `all`, or `supervised` when the last layer's states
    are kept at supervised tokens only.
    """

    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    format: str = "lossless"
    last_state: str = "all"
    tokenizer: str = ""

    @property
    def key(self) -> str:
        return digest(
            SHARD_VERSION,
            self.fingerprint,
            list(self.layer_ids),
            self.hidden_size,
            self.format,
            self.last_state,
        )[:16]

    def as_json(self) -> dict[str, Any]:
        """What manifests say of it."""
        return {
            "key": self.key,
            "verifier": self.fingerprint,
            "layer_ids": list(self.layer_ids),
            "hidden_size": self.hidden_size,
            "format": self.format,
        }

    def bytes_per_token(self) -> int:
        """Uncompressed bytes of one token's states."""
        return len(self.layer_ids) * self.hidden_size * 2


@dataclass
class Sample:
    """One sample of a shard: `tokens` int64 [T], `states` bf16 [T, ids, hidden].

    `loss_mask` bool [T]: asked for by the convention `last_state: supervised`, which keeps the
    last layer's states where it is set; those read elsewhere are zero. `fp8`: codes and scales
    that a shard of that format had, so that a copy of the sample is not rounded again.
    """

    id: str
    tokens: torch.Tensor
    states: torch.Tensor
    loss_mask: Sequence[bool] | None = None
    fp8: tuple[np.ndarray, np.ndarray] | None = None


def sample_key(tokens: Iterable[int], loss_mask: Sequence[bool] | None = None) -> str:
    """Hash of a sample's tokens: the name of its states within one convention.

    With `loss_mask` also of that, for the convention that keeps other states with another mask.
    """
    data = np.asarray(list(tokens), dtype="<i4").tobytes()
    if loss_mask is not None:
        data += np.asarray(loss_mask, dtype=np.uint8).tobytes()
    return xxhash.xxh3_128_hexdigest(data)


def shard_id(sample_keys: Iterable[str]) -> str:
    """Name of the shard that holds these samples in this order, in any convention's folder."""
    return digest(list(sample_keys))


def _bits(states: torch.Tensor) -> np.ndarray:
    return states.contiguous().view(torch.uint16).numpy()


def checksum(states: torch.Tensor) -> str:
    """xxh3 of the bf16 bytes of [T, ids, hidden] states in C order, little endian."""
    return xxhash.xxh3_64_hexdigest(_bits(states))


# Packing


_local = threading.local()


def _scratch(name: str, size: int) -> np.ndarray:
    """A buffer of this thread, reused: fresh memory costs more than what is done in it."""
    buffer = getattr(_local, name, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size, np.uint8)
        setattr(_local, name, buffer)
    return buffer[:size]


def rows_by_layer(length: int, layers: int, loss_mask: Sequence[bool] | None) -> list[np.ndarray]:
    """Positions whose states are stored, int64, of each layer: all, of the last those in the
    mask where there is one."""
    every = np.arange(length)
    last = every if loss_mask is None else np.flatnonzero(np.asarray(loss_mask, dtype=bool))
    return [every] * (layers - 1) + [last]


def _cut(stored: list[np.ndarray]) -> list[slice]:
    """Where each layer's rows lie among all that are stored."""
    ends = np.cumsum([len(rows) for rows in stored]).tolist()
    return [slice(end - len(rows), end) for end, rows in zip(ends, stored, strict=True)]


def compress(data: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(compression_params=ZSTD).compress(data)


def decompress(frame: np.ndarray, into: np.ndarray) -> None:
    """Raises `zstandard.ZstdError` or `ValueError` when `into` is not filled exactly."""
    reader = zstandard.ZstdDecompressor().stream_reader(frame, read_across_frames=False)
    if reader.readinto(into) != into.nbytes or reader.read(1):
        raise ValueError("the compressed states have another size than the index says")


def exponent_base(
    parts: Sequence[tuple[np.ndarray, list[np.ndarray]]], rows: int = 768
) -> tuple[np.ndarray, np.ndarray]:
    """Each channel's median exponent, and how far from it a layer's exponents are in the mean.

    `parts`: bits uint16 [T, ids, hidden] of each sample and the stored positions by layer; of
    each layer at most about `rows` of them, and an eighth, are looked at. Returns uint8
    [ids, hidden], float64 [ids].
    """
    layers, width = parts[0][0].shape[1:]
    base, means = np.zeros((layers, width), np.uint8), np.zeros(layers)
    for k in range(layers):
        step = max(8, sum(len(stored[k]) for _, stored in parts) // rows)
        skip, chosen = 0, []
        for bits, stored in parts:
            places = stored[k][skip::step]
            skip = (skip - len(stored[k])) % step
            chosen.append((bits[places, k] >> 7).astype(np.uint8))
        exponents = np.concatenate(chosen)
        if len(exponents):
            planes.medians(exponents, base[k])
            means[k] = (exponents - base[k]).view(np.int8).mean(dtype=np.float64)
    return base, means


def _planes(rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Buffers of this thread for what `planes.split` makes and zstandard packs: offsets [R] and
    exponents [R, hidden], these two once more as one vector, and lowest bits [R, hidden / 8]."""
    high = _scratch("high", rows * (1 + width))
    low = _scratch("low", rows * (width // 8)).reshape(rows, width // 8)
    return high[:rows], high[rows:].reshape(rows, width), high, low


def pack(
    bits: np.ndarray, stored: list[np.ndarray], base: np.ndarray, means: np.ndarray
) -> tuple[bytes, bytes, np.ndarray]:
    """Split bf16 bits [T, ids, hidden] into two zstandard frames and a plane of bytes.

    Layer after layer, of each the `stored` positions: R rows in all. The frames hold offsets and
    exponents, and the lowest bits; the plane uint8 [R, 7/8 hidden] the rest, which does not pack:
    see `planes.split`. It is a buffer of this thread: use it before the next call.
    """
    rows, width = sum(map(len, stored)), bits.shape[2]
    offsets, exponents, high, low = _planes(rows, width)
    rest = _scratch("rest", rows * (width - width // 8)).reshape(rows, width - width // 8)
    for k, at in enumerate(_cut(stored)):
        planes.split(
            bits, k, stored[k], base[k], means[k], exponents[at], offsets[at], low[at], rest[at]
        )
    return compress(high), compress(low), rest


def unpack(
    packed: Sequence[np.ndarray],
    stored: list[np.ndarray],
    base: np.ndarray,
    bits: np.ndarray,
) -> None:
    """The inverse of `pack`: fills the `stored` rows of `bits` uint16 [T, ids, hidden]."""
    rows, width = sum(map(len, stored)), bits.shape[2]
    offsets, exponents, high, low = _planes(rows, width)
    decompress(packed[0], high)
    decompress(packed[1], low.reshape(-1))
    rest = packed[2].reshape(rows, width - width // 8)
    for k, at in enumerate(_cut(stored)):
        planes.merge(exponents[at], offsets[at], low[at], rest[at], stored[k], base[k], k, bits)


def pack_fp8(codes: np.ndarray, scales: np.ndarray, stored: list[np.ndarray]) -> bytes:
    """A frame of the scales float32 [T] and of the stored rows of codes uint8 [T, ids, hidden]."""
    parts = [codes[rows, k].reshape(-1) for k, rows in enumerate(stored)]
    return compress(np.concatenate([scales.astype("<f4").view(np.uint8), *parts]))


def unpack_fp8(
    frame: np.ndarray, stored: list[np.ndarray], bits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fill the stored rows of `bits` [T, ids, hidden]; return codes and scales of all rows."""
    length, _, width = bits.shape
    plain = _scratch("high", 4 * length + sum(map(len, stored)) * width)
    decompress(frame, plain)
    scales = plain[: 4 * length].view("<f4").copy()
    found = plain[4 * length :].reshape(-1, width)
    codes = np.zeros(bits.shape, np.uint8)
    for k, at in enumerate(_cut(stored)):
        codes[stored[k], k] = found[at]
        planes.dequantize(found[at], E4M3, scales, stored[k], k, bits)
    return codes, scales


class Teacher:
    """The verifier's output head: logits = lm_head(final_norm(h[n])).

    The head's products are in its own bf16 where the processor has that (a quarter of the time of
    float32, which a writer would take from an engine on the same cores), else in float32.
    Proves that captured states are what they are said to be: they must lead to the tokens that
    the verifier itself chose. Source of the convention: transformers' `LlamaForCausalLM`.
    """

    def __init__(self, model: Path):
        from speculators.utils.loading import load_model_layers

        from aerie.verifier.checkpoint import text_config

        names = ["model.norm.weight", "lm_head.weight", "embed_tokens.weight"]
        weights = load_model_layers(names, str(model))
        config = text_config(model)
        head = weights.get("lm_head.weight", weights.get("embed_tokens.weight"))
        if head is None or "model.norm.weight" not in weights:
            raise InputError(f"{model}: found no output head or final norm among its weights")
        fast = head.dtype == torch.bfloat16 and processor_computes_bf16()
        self.head = head if fast else head.float()
        self.norm = weights["model.norm.weight"].float()
        self.eps = getattr(config, "rms_norm_eps", 1e-6)

    def normed(self, last_states: torch.Tensor) -> torch.Tensor:
        """States [T, hidden] after the final norm (RMS norm), float32."""
        x = last_states.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm

    def ranks(self, last_states: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """How many tokens the head prefers to the chosen one: int64 [T], 0 for the best.

        `last_states` [T, hidden], `next_tokens` [T]. States that prefer none are no token's, and
        there the chosen one is the last: zeros, NaN, or numbers whose squares are infinite.
        """
        logits = self.normed(last_states).to(self.head.dtype) @ self.head.T
        chosen = logits.gather(1, next_tokens.long()[:, None])
        prefers = (logits < chosen).any(1)
        return torch.where(prefers, (logits > chosen).sum(1), len(self.head))

    def check(self, states: torch.Tensor, next_tokens: list[int], greedy: bool) -> None:
        """Raise `UnusableStates` when the last states of the final `len(next_tokens)` positions do
        not lead to the tokens that the verifier chose after them (`judge_ranks`)."""
        if next_tokens:
            places = _spread(len(next_tokens))
            last, chosen = states[-len(next_tokens) :, -1], torch.tensor(next_tokens)
            judge_ranks(self.ranks(last[places], chosen[places]), greedy)


def _spread(count: int) -> torch.Tensor:
    """At most 64 positions, spread over all: int64."""
    return torch.linspace(0, count - 1, min(count, 64)).round().long()


def judge_ranks(ranks: torch.Tensor, greedy: bool) -> None:
    """Raise `UnusableStates` when these `Teacher.ranks` are not those of the tokens' own states.

    Looked at are 64 of them, spread over all. A near tie may fall either way in bf16, so of many
    four fifths must be the best, and nine tenths must be among the best five and none beyond the
    best hundred, so that one pair of samples that changed places is found. Sampled tokens only
    have to be likely.
    """
    ranks = ranks[_spread(len(ranks))]
    limit = 5 if greedy else 1000
    agree = (ranks == 0).float().mean().item()
    if (ranks < limit).float().mean().item() < 0.9 or (
        greedy and (int(ranks.max()) >= 100 or (len(ranks) >= 8 and agree < 0.8))
    ):
        raise UnusableStates(
            "lm_head(final_norm(last states)) does not lead to the tokens that the verifier "
            f"chose: {agree:.0%} agree, worst rank {int(ranks.max())}; the layer ids or the "
            "final-norm convention are shifted, or this is another model"
        )


def check_states(
    states: torch.Tensor,
    tokens: torch.Tensor,
    convention: Convention,
    loss_mask: Sequence[bool] | None = None,
    rounded: bool = False,
) -> None:
    """Raise `UnusableStates` for states that cannot be those of `tokens`.

    With `loss_mask` the last layer is looked at only where that is set. Of states that were
    `rounded` to fp8 only shape, NaN and infinity are: its one scale a token makes the small
    values of one layer zero where another layer's are some ten thousand times as large.

    Wrong shape or dtype; NaN or infinity; a row with one value in all channels or mostly zeros;
    a row that is the same at different tokens, whatever lies between them; two layers alike.
    """
    wanted = (len(tokens), len(convention.layer_ids), convention.hidden_size)
    if tuple(states.shape) != wanted or states.dtype != torch.bfloat16:
        raise UnusableStates(
            f"states are {states.dtype} {list(states.shape)}, expected torch.bfloat16 "
            f"{list(wanted)} for {len(tokens)} tokens"
        )
    bits = _bits(states)
    digests = np.empty(wanted[:2], np.uint32)
    last = np.ones(len(bits), bool) if loss_mask is None else np.asarray(loss_mask, dtype=bool)
    faults = planes.scan(bits, last, _weights(wanted[2]), digests)
    if faults & planes.NOT_FINITE:
        raise UnusableStates("states hold NaN or infinity")
    if rounded:
        return
    if faults & planes.CONSTANT:
        raise UnusableStates("states are the same in all channels of a layer")
    if faults & planes.ZEROS:
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
def _weights(width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 31, width, dtype=np.uint32) | np.uint32(1)


class Store:
    """The folder of one convention's shards."""

    def __init__(self, root: Path, convention: Convention):
        if convention.format not in FORMATS or convention.last_state not in LAST_STATES:
            raise InputError(
                f"found format {convention.format!r}, last_state {convention.last_state!r}; "
                f"expected one of {', '.join(FORMATS)} and one of {', '.join(LAST_STATES)}"
            )
        if convention.hidden_size % 8:
            raise InputError(
                f"the verifier's hidden size is {convention.hidden_size}; shards take multiples "
                "of 8"
            )
        self.convention = convention
        self.folder = Path(root) / "hidden_states" / convention.key

    def path(self, shard: str) -> Path:
        return self.folder / f"{shard}.safetensors"

    def has(self, shard: str) -> bool:
        return self.path(shard).is_file()

    def key(self, tokens: Sequence[int], loss_mask: Sequence[bool]) -> str:
        """`sample_key` of a sample in this convention."""
        supervised = self.convention.last_state == "supervised"
        return sample_key(tokens, loss_mask if supervised else None)

    def write(
        self, shard: str, samples: list[Sample], beat: Callable[[], None] = lambda: None
    ) -> Path:
        """Check and write a shard; nothing bears its name before it was opened and its first
        sample read back. `beat` is called for each sample that was packed.

        Raises `UnusableStates` for states that fail `check_states`, and for two samples of
        different tokens with the same states.
        """
        c = self.convention
        supervised = c.last_state == "supervised"
        for sample in samples:
            mask = sample.loss_mask if supervised else None
            check_states(sample.states, sample.tokens, c, mask, sample.fp8 is not None)
            if supervised and len(sample.loss_mask) != len(sample.tokens):
                raise ValueError(f"sample {sample.id}: the loss mask has another length")
        samples = [_as_stored(s, c) for s in samples]
        masks = [s.loss_mask if supervised else None for s in samples]
        stored = [
            rows_by_layer(len(s.tokens), len(c.layer_ids), mask)
            for s, mask in zip(samples, masks, strict=True)
        ]
        index = [
            {
                "id": s.id,
                "key": sample_key(s.tokens.tolist(), mask),
                "tokens": len(s.tokens),
                "checksum": checksum(s.states),
                **({"last_rows": _runs(mask)} if supervised else {}),
            }
            for s, mask in zip(samples, masks, strict=True)
        ]
        first: dict[str, dict[str, Any]] = {}
        for entry in index:
            twin = first.setdefault(entry["checksum"], entry)
            if twin["key"] != entry["key"]:
                raise UnusableStates(f"samples {twin['id']} and {entry['id']} have the same states")
        metadata = {
            "aerie": str(SHARD_VERSION),
            "shard": shard,
            "format": c.format,
            "layer_ids": json.dumps(list(c.layer_ids)),
            "last_state": c.last_state,
            "last_layer": "before the final norm",
            "hidden_size": str(c.hidden_size),
            "verifier": c.fingerprint,
            "tokenizer": c.tokenizer,
            "samples": json.dumps(index),
        }
        metadata["checksum"] = _metadata_checksum(metadata)
        path = self.path(shard)
        with atomic_write(path) as temporary:
            with temporary.open("wb") as raw:
                file = _TensorFile(raw, metadata, tensors=4 * len(samples) + 1)
                for number, sample in enumerate(samples):
                    tokens = sample.tokens.numpy().astype("<i4")
                    file.add(f"{number:06d}.tokens", "I32", tokens.shape, tokens)
                if c.format == "lossless":
                    base, means = exponent_base(
                        [(_bits(s.states), rows) for s, rows in zip(samples, stored, strict=True)]
                    )
                    file.add("base", "U8", base.shape, base)
                for number, (sample, rows) in enumerate(zip(samples, stored, strict=True)):
                    name = f"{number:06d}"
                    if c.format == "raw":
                        bits = _bits(sample.states)
                        data = np.concatenate([bits[r, k] for k, r in enumerate(rows)])
                        file.add(f"{name}.states", "BF16", data.shape, data)
                    elif c.format == "fp8":
                        frame = pack_fp8(*sample.fp8, rows)
                        file.add(f"{name}.fp8", "U8", (len(frame),), frame)
                    else:
                        high, low, rest = pack(_bits(sample.states), rows, base, means)
                        file.add(f"{name}.exponents", "U8", (len(high),), high)
                        file.add(f"{name}.low", "U8", (len(low),), low)
                        file.add(f"{name}.rest", "U8", rest.shape, rest)
                    beat()
                file.finish()
            with Shard(temporary) as written:
                written.read(0)
        return path

    def find_samples(self, keys: set[str]) -> dict[str, tuple[Path, int]]:
        """Where samples with these keys lie in any shard of the folder: file and position."""
        found: dict[str, tuple[Path, int]] = {}
        if not keys or not self.folder.is_dir():
            return found
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with Shard(path) as shard:
                    for number, entry in enumerate(shard.samples):
                        if entry["key"] in keys:
                            found[entry["key"]] = (path, number)
            except AerieError:
                continue
        return found

    @staticmethod
    def set_aside(path: Path) -> Path | None:
        """Move what is no whole shard out of the way, so that it is made again; its new name,
        None when somebody else was first."""
        target = path.parent / QUARANTINE / path.name
        with contextlib.suppress(FileNotFoundError):
            target.parent.mkdir(exist_ok=True)
            if target.is_dir() and not target.is_symlink():  # replaced by no file
                shutil.rmtree(target)
            elif path.is_dir():  # replaces no file
                target.unlink(missing_ok=True)
            path.replace(target)
            return target
        return None


def _as_stored(sample: Sample, convention: Convention) -> Sample:
    """The sample as it will be read: rows that are not stored are zero, fp8 is rounded."""
    states, fp8 = sample.states, sample.fp8
    if convention.last_state == "supervised":
        states = states.clone()
        states[~torch.as_tensor(np.asarray(sample.loss_mask, dtype=bool)), -1] = 0
    if convention.format == "fp8":
        bits = _bits(states)
        if fp8 is None:
            fp8 = np.empty(bits.shape, np.uint8), np.empty(len(bits), np.float32)
            planes.quantize(bits, *fp8)
        rounded, every = np.empty_like(bits), np.arange(len(bits))
        for k in range(bits.shape[1]):
            codes = np.ascontiguousarray(fp8[0][:, k])
            planes.dequantize(codes, E4M3, fp8[1], every, k, rounded)
        states = torch.from_numpy(rounded).view(torch.bfloat16)
    return replace(sample, states=states, fp8=fp8)


def _runs(mask: Sequence[bool]) -> list[list[int]]:
    """[start, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, dtype=np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2).tolist()


def _metadata_checksum(metadata: dict[str, str]) -> str:
    text = "\n".join(f"{k}={v}" for k, v in sorted(metadata.items()) if k != "checksum")
    return xxhash.xxh3_64_hexdigest(text.encode())


class _TensorFile:
    """Writes a safetensors file as its tensors come, so that none but one is held in memory.

    The header is filled in last; `metadata` and the number of `tensors` tell how much room it
    needs. What is left of it is blank, as the format allows.
    """

    def __init__(self, file: BinaryIO, metadata: dict[str, str], tensors: int):
        self.file, self.header = file, {"__metadata__": metadata}
        self.room = (len(json.dumps(self.header)) + 120 * tensors + 7) // 8 * 8
        self.end = 0
        file.seek(8 + self.room)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: Any) -> None:
        start, self.end = self.end, self.end + memoryview(data).nbytes
        self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, self.end]}
        self.file.write(data)

    def finish(self) -> None:
        text = json.dumps(self.header, separators=(",", ":")).encode()
        assert len(text) <= self.room
        self.file.seek(0)
        self.file.write(struct.pack("<Q", self.room) + text.ljust(self.room))


class Shard:
    """An open shard file. `samples`: one entry each with `id`, `key`, `tokens`, `checksum`;
    `name`: the id it was written under; `size`: bytes of the file.

    Raises `UnusableStates` for a file that is absent, cut, damaged or another's; `InputError` for
    one that says nothing of its states: of another version of the format, or not to be read now.
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
        """Turn whatever reading raises into `UnusableStates`, or `InputError` where not the file
        is at fault (rights, open files, a server), so that it stays where it is."""
        try:
            yield
        except OSError as error:
            text = error.strerror or str(error)
            if error.errno not in _NO_SHARD:
                raise InputError(
                    f"{self.path}: cannot be read ({text}), which says nothing of its states; "
                    "put that right and run again"
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
        ours = {**meta, "aerie": str(SHARD_VERSION)}
        another = found.isdecimal() and len(found) < 6 and meta != ours
        if another and meta.get("checksum") != _metadata_checksum(ours):  # else a flipped digit
            raise InputError(
                f"{self.path}: a shard of format version {found}, and this Aerie reads version "
                f"{SHARD_VERSION} only; its states are found by the Aerie that wrote it, or made "
                "anew by the next run, after which `scripts/store.py gc` collects the file"
            )
        if meta["checksum"] != _metadata_checksum(meta):
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
        self.samples: list[dict[str, Any]] = json.loads(meta["samples"])
        if self.format == "lossless":
            shape = (len(self.layer_ids), self.hidden_size)
            self._base = self._bytes(["base"]).reshape(shape).copy()

    def _read(self, start: int, size: int) -> np.ndarray:
        """Bytes of the file in a buffer of this thread; the system gives up to 2 GiB a call."""
        if size < 0:
            raise ValueError("its tensors do not lie in order")
        buffer, done = _scratch("file", size), 0
        while done < size:
            count = os.preadv(self._file.fileno(), [buffer[done:]], start + done)
            if not count:
                raise ValueError("the file is cut short")
            done += count
        return buffer

    def _bytes(self, names: list[str]) -> np.ndarray:
        """Bytes of tensors that lie side by side, in a buffer of this thread."""
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
        """Sample at this position, decoded and compared with its checksum."""
        entry = self.samples[number]
        with self._refusing(f"sample {entry['id']} cannot be read: "):
            sample = self._decode(f"{number:06d}", entry)
        key = sample_key(sample.tokens.tolist(), sample.loss_mask)
        if checksum(sample.states) != entry["checksum"] or key != entry["key"]:
            raise UnusableStates(f"{self.path}: sample {entry['id']} does not match its checksum")
        return sample

    def _decode(self, name: str, entry: dict[str, Any]) -> Sample:
        length, layers, width = entry["tokens"], len(self.layer_ids), self.hidden_size
        mask = None
        if self.last_state == "supervised":
            mask = np.zeros(length, dtype=bool)
            for start, end in entry["last_rows"]:
                mask[start:end] = True
        rows = rows_by_layer(length, layers, mask)
        tokens = self._bytes([f"{name}.tokens"]).view("<i4").astype(np.int64)
        if len(tokens) != length:
            raise ValueError(f"{len(tokens)} tokens, the index says {length}")
        bits = np.empty((length, layers, width), np.uint16)
        fp8 = None
        if mask is not None:
            bits[~mask, -1] = 0
        if self.format == "raw":
            data = self._bytes([f"{name}.states"]).view(np.uint16).reshape(-1, width)
            for k, part in enumerate(_cut(rows)):
                bits[rows[k], k] = data[part]
        elif self.format == "fp8":
            fp8 = unpack_fp8(self._bytes([f"{name}.fp8"]), rows, bits)
        else:
            names = [f"{name}.exponents", f"{name}.low", f"{name}.rest"]
            data = self._bytes(names)
            ends = np.cumsum([np.diff(self._places[n])[0] for n in names])
            unpack(np.split(data, ends[:2]), rows, self._base, bits)
        states = torch.from_numpy(bits).view(torch.bfloat16)
        return Sample(entry["id"], torch.from_numpy(tokens), states, mask, fp8)

    def omitted_bytes(self) -> int:
        """Bytes of bf16 states of the last layer that are not stored: no loss is taken there."""
        if self.last_state == "all":
            return 0
        kept = sum(end - start for s in self.samples for start, end in s["last_rows"])
        return 2 * self.hidden_size * (sum(s["tokens"] for s in self.samples) - kept)

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def file_checksum(path: Path) -> str:
    """xxh3 of a whole file."""
    state = xxhash.xxh3_64()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def group_records(ids: list[str], mean: int) -> list[list[int]]:
    """Cut records into groups by their own ids: lists of positions, in order.

    A cut falls after a record whose id's hash is a multiple of `mean`, within a quarter and four
    times `mean` records, so an edit moves only the cuts around it (content-defined chunking;
    Muthitacharoen et al., SOSP 2001).
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
