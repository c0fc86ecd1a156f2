"""Codes of 1 to 7 bits packed into bytes on a CPU, and unpacked again. Imported only where numba is installed."""

from __future__ import annotations

import numpy as np
from numba import njit

# Whole numbers are cast after every operation: numba would widen them to 64 bits, and vectors would be half as long.
_u8, _u64 = np.uint8, np.uint64


@njit(cache=True, nogil=True)
def pack(codes, length, bits, out):
    """Pack the lowest `bits` (1 to 7) of each of `length` bytes; the rest of the last eight bytes must be zeros."""
    if bits == 4:
        for i in range(len(out)):
            out[i] = _u8(codes[2 * i] | (codes[2 * i + 1] << _u8(4)))
        return
    if bits == 2:
        for i in range(len(out)):
            low, high = codes[4 * i] | (codes[4 * i + 1] << _u8(2)), codes[4 * i + 2] | (codes[4 * i + 3] << _u8(2))
            out[i] = _u8(low | (high << _u8(4)))
        return
    words = codes.view(_u64)
    if bits == 1:
        for i in range(len(out)):
            # Of the product only the top byte matters: there each code meets its own power of two.
            out[i] = _u8(_u64(words[i] * _u64(0x0102040810204080)) >> _u64(56))
        return
    # Eight codes are one word: neighbours are moved together, then pairs, then fours.
    b = _u64(bits)
    one = _u64(((_u64(1) << b) - _u64(1)) * _u64(0x0001000100010001))
    two = _u64(((_u64(1) << _u64(_u64(2) * b)) - _u64(1)) * _u64(0x0000000100000001))
    four = _u64((_u64(1) << _u64(_u64(4) * b)) - _u64(1))
    for group in range((length + 7) // 8):
        word = words[group]
        word = _u64((word & one) | ((word >> _u64(_u64(8) - b)) & _u64(one << b)))
        word = _u64((word & two) | ((word >> _u64(_u64(16) - _u64(2) * b)) & _u64(two << _u64(_u64(2) * b))))
        word = _u64((word & four) | ((word >> _u64(_u64(32) - _u64(4) * b)) & _u64(four << _u64(_u64(4) * b))))
        for byte in range(group * bits, min(group * bits + bits, len(out))):
            out[byte] = _u8(word & _u64(0xFF))
            word = _u64(word >> _u64(8))


@njit(cache=True, nogil=True)
def unpack(data, length, bits, codes):
    """The inverse of `pack`."""
    if bits == 4:
        for i in range(len(data)):
            codes[2 * i], codes[2 * i + 1] = data[i] & _u8(15), data[i] >> _u8(4)
        return
    if bits == 2:
        for i in range(len(data)):
            codes[4 * i], codes[4 * i + 1] = data[i] & _u8(3), (data[i] >> _u8(2)) & _u8(3)
            codes[4 * i + 2], codes[4 * i + 3] = (data[i] >> _u8(4)) & _u8(3), data[i] >> _u8(6)
        return
    words = codes.view(_u64)
    if bits == 1:
        for i in range(len(data)):
            # The byte eight times, one bit of each copy kept, and that bit moved to the bottom.
            spread = _u64(_u64(data[i]) * _u64(0x0101010101010101)) & _u64(0x8040201008040201)
            words[i] = _u64((_u64(spread + _u64(0x7F7F7F7F7F7F7F7F)) >> _u64(7)) & _u64(0x0101010101010101))
        return
    b = _u64(bits)
    one = _u64(((_u64(1) << b) - _u64(1)) * _u64(0x0001000100010001))
    two = _u64(((_u64(1) << _u64(_u64(2) * b)) - _u64(1)) * _u64(0x0000000100000001))
    four = _u64((_u64(1) << _u64(_u64(4) * b)) - _u64(1))
    for group in range((length + 7) // 8):
        word = _u64(0)
        for byte in range(min(bits, len(data) - group * bits)):
            word = _u64(word | (_u64(data[group * bits + byte]) << _u64(8 * byte)))
        word = _u64((word & four) | ((word & _u64(four << _u64(_u64(4) * b))) << _u64(_u64(32) - _u64(4) * b)))
        word = _u64((word & two) | ((word & _u64(two << _u64(_u64(2) * b))) << _u64(_u64(16) - _u64(2) * b)))
        words[group] = _u64((word & one) | ((word & _u64(one << b)) << _u64(_u64(8) - b)))
