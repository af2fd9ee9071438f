"""Compiled loops over the bits of bf16 states: checks, and splitting into planes.

numba compiles them once a machine and caches them beside this file; they release the GIL. A bf16
value is sign (bit 15), exponent (bits 14 to 7), mantissa (bits 6 to 0).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite.binding.ffi
import numba
import numpy as np
import numpy.typing as npt

_Library: Any = type(llvmlite.binding.ffi.lib)
_find_function = _Library.__getattr__


def _only_functions(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _find_function(self, name)


# llvmlite's library returns a function for every name, even `__dict__`. When an engine starts on
# a CPU, vLLM 0.32.0 looks through the attributes of all loaded modules, and fails over that.
_Library.__getattr__ = _only_functions

_Function = TypeVar("_Function", bound=Callable[..., Any])
_compiled: Callable[[_Function], _Function] = numba.njit(nogil=True, cache=True)

Bits = npt.NDArray[np.uint16]
"""Bits of bf16 values."""
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]

NOT_FINITE, CONSTANT, ZEROS = 1, 2, 4


@_compiled
def quantize(bits: Bits, codes: Bytes, scales: Floats) -> None:
    """States `bits` uint16 [T, ids, hidden] to float8_e4m3fn `codes` uint8, with `scales`
    float32 [T]: what hs_connectors.fp8_utils.quantize_tensor_to_fp8 gives, which torch computes
    several times slower on a CPU. Rounds to nearest, ties to even."""
    length, layers, width = bits.shape
    row = np.empty(width, np.uint32)
    values = row.view(np.float32)
    for t in range(length):
        largest = np.uint16(0)
        for k in range(layers):
            for c in range(width):
                largest = max(largest, np.uint16(bits[t, k, c] & 0x7FFF))
        row[0] = np.uint32(largest) << np.uint32(16)
        scale = max(values[0] / np.float32(448), np.float32(1e-12))
        scales[t] = scale
        for k in range(layers):
            for c in range(width):
                row[c] = np.uint32(bits[t, k, c] & 0x7FFF) << np.uint32(16)
            for c in range(width):
                values[c] = values[c] / scale
            for c in range(width):
                x = row[c]
                if x >= np.uint32(121 << 23):  # 2^-6, the smallest normal number
                    x += np.uint32(0x7FFFF) + ((x >> np.uint32(20)) & np.uint32(1))
                    code = (x >> np.uint32(20)) - np.uint32(120 << 3)
                else:
                    code = np.uint32(np.rint(values[c] * np.float32(512)))
                sign = np.uint32(bits[t, k, c] >> 8) & np.uint32(0x80)
                codes[t, k, c] = np.uint8(code | sign)


@_compiled
def dequantize(
    codes: Bytes, values: Floats, scales: Floats, rows: Positions, layer: int, bits: Bits
) -> None:
    """Fill `rows` of one layer of `bits` uint16 [T, ids, hidden] with value x scale in bf16.

    `codes` uint8 [R, hidden]; `values` float32 [256]: what a code stands for; `scales` float32
    [T], as stored. Same bits as hs_connectors.fp8_utils.dequantize_fp8_tensor.
    """
    width = codes.shape[1]
    row = np.empty(width, np.float32)
    words = row.view(np.uint32)
    for r in range(len(rows)):
        row[0] = scales[rows[r]]
        rounded = words[0] + np.uint32(0x7FFF) + ((words[0] >> np.uint32(16)) & np.uint32(1))
        words[0] = rounded & np.uint32(0xFFFF0000)
        scale = row[0]
        for c in range(width):
            row[c] = values[codes[r, c]] * scale
        out = bits[rows[r], layer]
        for c in range(width):
            x = words[c]
            out[c] = np.uint16(
                (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            )


@_compiled
def scan(bits: Bits, last: npt.NDArray[np.bool_], weights: Words, digests: Words) -> int:
    """Faults of states `bits` uint16 [T, ids, hidden]: the constants above, or-ed together.

    NaN or infinity; one value in all channels of a row; zeros in half of a row or more (as when
    one of two GPUs has not added its part).
    `last` bool [T]: where the last layer is checked. `digests` uint32 [T, ids] gets a hash of
    each row, with `weights` uint32 [hidden], odd.
    """
    faults = 0
    length, layers, width = bits.shape
    for t in range(length):
        for k in range(layers):
            if k == layers - 1 and not last[t]:
                digests[t, k] = 0
                continue
            row = bits[t, k]
            first = row[0]
            differs = np.uint16(0)
            infinite = np.uint16(0)
            zeros = np.uint32(0)
            digest = np.uint32(0)
            for c in range(width):
                value = row[c]
                differs |= np.uint16(value ^ first)
                infinite |= np.uint16((value & 0x7F80) == 0x7F80)
                zeros += np.uint32((value & 0x7FFF) == 0)
                digest += np.uint32(value) * weights[c]
            digests[t, k] = digest
            if infinite:
                faults |= NOT_FINITE
            if differs == 0 and width > 1:
                faults |= CONSTANT
            if 2 * zeros >= width:
                faults |= ZEROS
    return faults


@_compiled
def _seven(value: np.uint16) -> np.uint16:
    return np.uint16((value >> np.uint16(9)) & np.uint16(0x40)) | np.uint16(
        (value >> np.uint16(1)) & np.uint16(0x3F)
    )


@_compiled
def split(
    bits: Bits,
    layer: int,
    rows: Positions,
    base: Bytes,
    mean: float,
    exponents: Bytes,
    offsets: Bytes,
    low: Bytes,
    rest: Bytes,
) -> None:
    """Split `rows` int64 [R] of one layer of `bits` uint16 [T, ids, hidden] into planes.

    `exponents` uint8 [R, hidden] gets exponent - base[channel] - offset[row], modulo 256;
    `offsets` uint8 [R] (two's complement) how far the row's mean lies from `mean`; `base` uint8
    [hidden]. A row is eight parts of E = hidden / 8 channels: bit i of `low` uint8 [R, E] is the
    mantissa's lowest bit in part i. The seven bits left, sign x 64 + mantissa // 2, of parts 0
    to 6 are the lower bits of `rest` uint8 [R, 7 E]; its highest bit in part i is bit i of part 7.
    """
    part = bits.shape[2] // 8
    sevens = np.empty(part, np.uint8)
    for r in range(len(rows)):
        row = bits[rows[r], layer]
        high, lowest, others = exponents[r], low[r], rest[r]
        for c in range(len(row)):
            high[c] = np.uint8(row[c] >> 7) - base[c]
        last = row[7 * part :]
        for j in range(part):
            sevens[j] = _seven(last[j])
            lowest[j] = (last[j] & 1) << 7
        for i in range(7):
            here, out = row[i * part : (i + 1) * part], others[i * part : (i + 1) * part]
            bit = np.uint8(1 << i)
            shift = np.uint8(7 - i)
            for j in range(part):
                value = here[j]
                out[j] = np.uint8(_seven(value)) | np.uint8(np.uint8(sevens[j] & bit) << shift)
                lowest[j] |= np.uint8(np.uint8(value & 1) << np.uint8(i))
        total: Any = 0
        for c in range(len(row)):
            total += np.int8(high[c])
        offset = np.uint8(np.int64(np.rint(total / len(row) - mean)))
        offsets[r] = offset
        if offset:
            for c in range(len(row)):
                high[c] -= offset


@_compiled
def merge(
    exponents: Bytes,
    offsets: Bytes,
    low: Bytes,
    rest: Bytes,
    rows: Positions,
    base: Bytes,
    layer: int,
    bits: Bits,
) -> None:
    """The inverse of `split`; rows of `bits` that are not in `rows` stay as they are."""
    part = bits.shape[2] // 8
    sevens = np.empty(part, np.uint8)
    for r in range(len(rows)):
        row = bits[rows[r], layer]
        high, lowest, others = exponents[r], low[r], rest[r]
        offset = offsets[r]
        sevens[:] = 0
        for i in range(8):
            out, e = row[i * part : (i + 1) * part], high[i * part : (i + 1) * part]
            b = base[i * part : (i + 1) * part]
            if i < 7:
                here = others[i * part : (i + 1) * part]
                for j in range(part):
                    sevens[j] |= (here[j] >> 7) << i
            else:
                here = sevens
            for j in range(part):
                exponent = np.uint8(e[j] + b[j] + offset)
                out[j] = (
                    (np.uint16(here[j] & 0x40) << 9)
                    | (np.uint16(exponent) << 7)
                    | (np.uint16(here[j] & 0x3F) << 1)
                    | ((lowest[j] >> i) & 1)
                )


@_compiled
def medians(exponents: Bytes, base: Bytes) -> None:
    """The median of each channel of `exponents` uint8 [R, hidden] into `base` uint8 [hidden]."""
    counts = np.empty(256, np.int32)
    for c in range(exponents.shape[1]):
        counts[:] = 0
        for r in range(exponents.shape[0]):
            counts[exponents[r, c]] += 1
        below, value = counts[0], 0
        while 2 * below < exponents.shape[0]:
            value += 1
            below += counts[value]
        base[c] = value
