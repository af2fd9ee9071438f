"""Compiled loops over the bits of bf16 states: checks, and splitting into planes.

numba compiles them once a machine and keeps them beside this file; they hold no GIL. A bf16
value is sign (bit 15), exponent (bits 14 to 7), mantissa (bits 6 to 0).
"""

import numba
import numpy as np

_compiled = numba.njit(nogil=True, cache=True)

NOT_FINITE, CONSTANT, ZEROS = 1, 2, 4


@_compiled
def scan(bits, weights, digests):
    """Faults of states `bits` uint16 [T, ids, hidden]: an or of the constants above.

    NaN or infinity; one value in all channels of a row; zero in more than half of a row.
    `digests` uint32 [T, ids] gets a hash of each row, with `weights` uint32 [hidden], odd.
    """
    faults = 0
    length, layers, width = bits.shape
    for t in range(length):
        for k in range(layers):
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
            if 2 * zeros > width:
                faults |= ZEROS
    return faults


@_compiled
def split(bits, layer, rows, base, mean, exponents, offsets, rest):
    """One layer of `bits` uint16 [T, ids, hidden] into planes, only `rows` int64 [R] of it.

    `exponents` uint8 [R, hidden] gets exponent - base[channel] - offset[row], modulo 256;
    `offsets` uint8 [R] (two's complement) how far the row's mean lies from `mean`; `rest` uint8
    [R, hidden] sign x 128 + mantissa. `base` uint8 [hidden].
    """
    for r in range(len(rows)):
        row = bits[rows[r], layer]
        high, low = exponents[r], rest[r]
        width = len(row)
        for c in range(width):
            value = row[c]
            high[c] = np.uint8(value >> 7) - base[c]
            low[c] = ((value >> 8) & 0x80) | (value & 0x7F)
        total = 0
        for c in range(width):
            total += np.int8(high[c])
        offset = np.uint8(np.int64(np.rint(total / width - mean)))
        offsets[r] = offset
        if offset:
            for c in range(width):
                high[c] -= offset


@_compiled
def merge(exponents, offsets, rest, rows, base, layer, bits):
    """The inverse of `split`; rows of `bits` that are not in `rows` stay as they are."""
    for r in range(len(rows)):
        row = bits[rows[r], layer]
        high, low = exponents[r], rest[r]
        offset = offsets[r]
        for c in range(len(row)):
            e = np.uint8(high[c] + base[c] + offset)
            s = low[c]
            row[c] = (np.uint16(s & 0x80) << 8) | (np.uint16(e) << 7) | np.uint16(s & 0x7F)
