"""Packing of bf16 states: bit planes compressed with zstandard, and fp8.

docs/formats.md describes the formats and why they are as they are.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
import zstandard

from aerie.states import kernels
from aerie.states.ids import LossMask
from aerie.states.kernels import Bits, Bytes, Floats, Positions

E4M3: Floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The value of each float8_e4m3fn code."""

# Huffman coding of literals and almost no search for matches, which hidden states do not contain:
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


def bits_of(states: torch.Tensor) -> Bits:
    """The bits of bf16 states, of the same shape."""
    bits: Bits = states.contiguous().view(torch.uint16).numpy()
    return bits


def checksum(states: torch.Tensor) -> str:
    """xxh3 of the bf16 bytes of [T, ids, hidden] states in C order, little endian."""
    return xxhash.xxh3_64_hexdigest(bits_of(states).data)


_local = threading.local()


def scratch(name: str, size: int) -> Bytes:
    """This thread's buffer of that name, reused: allocating costs more than the work in it."""
    buffer: Bytes | None = getattr(_local, name, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size, np.uint8)
        setattr(_local, name, buffer)
    return buffer[:size]


def rows_by_layer(length: int, layers: int, loss_mask: LossMask | None) -> list[Positions]:
    """Positions whose states are stored, by layer: all of them; in the last layer, only those in
    the mask if there is one."""
    every = np.arange(length)
    last = every if loss_mask is None else np.flatnonzero(np.asarray(loss_mask, dtype=bool))
    return [every] * (layers - 1) + [last]


def layer_slices(stored: list[Positions]) -> list[slice]:
    """Where each layer's rows lie among all stored rows."""
    ends = np.cumsum([len(rows) for rows in stored]).tolist()
    return [slice(end - len(rows), end) for end, rows in zip(ends, stored, strict=True)]


def _compress(data: Bytes) -> bytes:
    return zstandard.ZstdCompressor(compression_params=ZSTD).compress(data.data)


def _decompress(frame: Bytes, into: Bytes) -> None:
    """Raises `zstandard.ZstdError` or `ValueError` unless the frame fills `into` exactly."""
    reader = zstandard.ZstdDecompressor().stream_reader(frame.data, read_across_frames=False)
    if reader.readinto(into.data) != into.nbytes or reader.read(1):
        raise ValueError("the compressed states have another size than the index says")


def exponent_base(
    parts: Sequence[tuple[Bits, list[Positions]]], rows: int = 768
) -> tuple[Bytes, npt.NDArray[np.float64]]:
    """Each channel's median exponent, and each layer's mean distance from it.

    `parts`: bits uint16 [T, ids, hidden] of each sample and its stored positions by layer. In
    each layer at most an eighth of the rows is sampled, and about `rows` of them. Returns uint8
    [ids, hidden] and float64 [ids].
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
            kernels.medians(exponents, base[k])
            means[k] = (exponents - base[k]).view(np.int8).mean(dtype=np.float64)
    return base, means


def _planes(rows: int, width: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """This thread's buffers between `kernels.split` and zstandard: offsets [R] and exponents
    [R, hidden], the two again as one vector, and the lowest bits [R, hidden / 8]."""
    high = scratch("high", rows * (1 + width))
    low = scratch("low", rows * (width // 8)).reshape(rows, width // 8)
    return high[:rows], high[rows:].reshape(rows, width), high, low


def pack(
    bits: Bits, stored: list[Positions], base: Bytes, means: npt.NDArray[np.float64]
) -> tuple[bytes, bytes, Bytes]:
    """Split bf16 bits [T, ids, hidden] into two zstandard frames and a plane of bytes.

    The rows go layer by layer, in each layer the `stored` positions: R rows in all. The frames
    hold offsets with exponents, and the lowest bits; the plane uint8 [R, 7/8 hidden] holds the
    rest, which does not compress (see `kernels.split`). The plane is a buffer of this thread:
    use it before the next call.
    """
    rows, width = sum(map(len, stored)), bits.shape[2]
    offsets, exponents, high, low = _planes(rows, width)
    rest = scratch("rest", rows * (width - width // 8)).reshape(rows, width - width // 8)
    for k, at in enumerate(layer_slices(stored)):
        kernels.split(
            bits, k, stored[k], base[k], means[k], exponents[at], offsets[at], low[at], rest[at]
        )
    return _compress(high), _compress(low.reshape(-1)), rest


def unpack(packed: Sequence[Bytes], stored: list[Positions], base: Bytes, bits: Bits) -> None:
    """The inverse of `pack`: fills the `stored` rows of `bits` uint16 [T, ids, hidden]."""
    rows, width = sum(map(len, stored)), bits.shape[2]
    offsets, exponents, high, low = _planes(rows, width)
    _decompress(packed[0], high)
    _decompress(packed[1], low.reshape(-1))
    rest = packed[2].reshape(rows, width - width // 8)
    for k, at in enumerate(layer_slices(stored)):
        kernels.merge(exponents[at], offsets[at], low[at], rest[at], stored[k], base[k], k, bits)


def round_fp8(bits: Bits, fp8: tuple[Bytes, Floats] | None) -> tuple[Bits, tuple[Bytes, Floats]]:
    """States as fp8 stores them, bits [T, ids, hidden], with their codes and scales.

    `fp8`: codes and scales that the states have already, so that they are not rounded twice.
    """
    if fp8 is None:
        fp8 = np.empty(bits.shape, np.uint8), np.empty(len(bits), np.float32)
        kernels.quantize(bits, *fp8)
    rounded, every = np.empty_like(bits), np.arange(len(bits))
    for k in range(bits.shape[1]):
        kernels.dequantize(np.ascontiguousarray(fp8[0][:, k]), E4M3, fp8[1], every, k, rounded)
    return rounded, fp8


def pack_fp8(codes: Bytes, scales: Floats, stored: list[Positions]) -> bytes:
    """A frame of the scales float32 [T] and the stored rows of codes uint8 [T, ids, hidden]."""
    parts = [codes[rows, k].reshape(-1) for k, rows in enumerate(stored)]
    return _compress(np.concatenate([scales.astype("<f4").view(np.uint8), *parts]))


def unpack_fp8(frame: Bytes, stored: list[Positions], bits: Bits) -> tuple[Bytes, Floats]:
    """Fill the stored rows of `bits` [T, ids, hidden]; return codes and scales of all rows."""
    length, _, width = bits.shape
    plain = scratch("high", 4 * length + sum(map(len, stored)) * width)
    _decompress(frame, plain)
    scales = plain[: 4 * length].view("<f4").copy()
    found = plain[4 * length :].reshape(-1, width)
    codes = np.zeros(bits.shape, np.uint8)
    for k, at in enumerate(layer_slices(stored)):
        codes[stored[k], k] = found[at]
        kernels.dequantize(found[at], E4M3, scales, stored[k], k, bits)
    return codes, scales
