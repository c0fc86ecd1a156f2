"""Functions that the CPU kernels of one chunk share: random numbers, the largest magnitude, sums.

Sums are in float64, in whatever order is fast. Imported only where numba is installed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Whole numbers are cast after every operation: numba would widen them to 64 bits, and vectors would be half as long.
_u32, _i32, _f32, _f64 = np.uint32, np.int32, np.float32, np.float64

INFINITY = _u32(0x7F800000)


@njit(cache=True, nogil=True)
def mix(x):
    x = _u32(x ^ (x >> _u32(16)))
    x = _u32(x * _u32(0x7FEB352D))
    x = _u32(x ^ (x >> _u32(15)))
    x = _u32(x * _u32(0x846CA68B))
    return _u32(x ^ (x >> _u32(16)))


@njit(cache=True, nogil=True)
def uniform(number):
    return _f32(_f32(_i32(number >> _u32(8))) * _f32(2.0**-24))


@njit(cache=True, nogil=True)
def fill(out, value):
    for i in range(len(out)):
        out[i] = value


@njit(cache=True, nogil=True)
def largest_bits(x):
    """The bits of max |x|: they order magnitudes, infinity comes after every finite value and NaN after infinity."""
    largest = _u32(0)
    for i in range(len(x)):
        bits = _u32(_f32(x[i]).view(_u32) & _u32(0x7FFFFFFF))
        largest = max(bits, largest)
    return largest


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def sum_of_squares(x):
    total = 0.0
    for i in range(len(x)):
        total += _f64(x[i]) * _f64(x[i])
    return total


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def sum_of_magnitudes(x):
    total = 0.0
    for i in range(len(x)):
        total += _f64(abs(x[i]))
    return total


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def sum_of_positives(x):
    total, count = 0.0, 0
    for i in range(len(x)):
        positive = x[i] >= _f32(0)
        total += _f64(x[i]) if positive else 0.0
        count += positive
    return total, count


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def sum_of_negatives(x):
    total = 0.0
    for i in range(len(x)):
        total += 0.0 if x[i] >= _f32(0) else _f64(x[i])
    return total
