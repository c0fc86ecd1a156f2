"""The k largest magnitudes on a CPU without sorting.

A sample gives a lower bound that a little more than k magnitudes reach; one pass collects those; the exact k-th largest
is found among them digit by digit. Where the sample misleads (many equal values), the digits of all values are counted
instead. Imported only where numba is installed.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

_SMALL = 2048
"""Number of values below which all are looked at."""
_BLOCK = 16
"""Values looked at together: most blocks hold nothing large and cost one vectorised comparison."""
_DIGIT_BITS = 11
LARGEST_KEY = np.iinfo(np.int32).max
"""The bits of a float32 without its sign."""

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def topk_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest magnitudes of `values` (one dimension) are, in ascending order; of equals the first."""
    if k in (0, values.numel()):
        return torch.arange(k)
    return torch.from_numpy(_topk(_bits(values), k))


def topk_of_rows(values: torch.Tensor, k: int) -> torch.Tensor:
    """For every row of `values`, where its k largest magnitudes are, in ascending order; of equals the first."""
    rows, width = values.shape
    if k in (0, width):
        return torch.arange(k).expand(rows, k)
    return torch.from_numpy(_topk_of_rows(_bits(values), k))


def _bits(values: torch.Tensor) -> NDArray[np.signedinteger]:
    return values.contiguous().view(_WHOLE_NUMBERS[values.dtype.itemsize]).numpy()


@njit(nogil=True, cache=True)
def _topk(bits, k):
    n = len(bits)
    mask = np.iinfo(bits.dtype).max
    if n > _SMALL:
        low, expected = _lower_bound(bits, mask, k)
        candidates = np.empty(min(n, expected + expected // 2 + 64), np.int64)
        count = collect(bits, mask, low, candidates)
        if count >= k:
            keys = np.empty(count, bits.dtype)
            for i in range(count):
                keys[i] = bits[candidates[i]] & mask
            return candidates[_exact(keys, k)]
        if count >= 0 and low == 1:
            return _with_zeros(bits, mask, k, k - count)
    keys = np.empty(n, bits.dtype)
    for i in range(n):
        keys[i] = bits[i] & mask
    return _exact(keys, k)


@njit(nogil=True, cache=True)
def _exact(keys, k):
    """Positions of the k largest of non-negative keys."""
    least, above = _kth_largest(keys, k)
    chosen = np.empty(k, np.int64)
    ties, found = k - above, 0
    for i in range(len(keys)):
        if keys[i] > least:
            chosen[found] = i
            found += 1
        elif keys[i] == least and ties > 0:
            chosen[found] = i
            found += 1
            ties -= 1
    return chosen


@njit(nogil=True, cache=True)
def _with_zeros(bits, mask, k, zeros):
    """Positions of all nonzero values and of the first `zeros` zeros: gradients of embeddings are mostly zero."""
    chosen = np.empty(k, np.int64)
    found = 0
    for i in range(len(bits)):
        if (bits[i] & mask) > 0:
            chosen[found] = i
            found += 1
        elif zeros > 0:
            chosen[found] = i
            found += 1
            zeros -= 1
    return chosen


@njit(nogil=True, cache=True)
def _lower_bound(bits, mask, k):
    """A key above zero that very likely at least k keys reach, and an upper estimate of their number."""
    n = len(bits)
    size = min(n // 16, 16384)
    stride = n // size
    sample = np.empty(size, bits.dtype)
    number = 0
    for i in range(size):
        # One of each `stride` neighbours, at a place that no regular pattern in the values can follow.
        number = (number * 1664525 + 1013904223) & 0xFFFFFFFF
        sample[i] = bits[i * stride + (number * stride >> 32)] & mask
    rank = k * size / n
    rank = min(size, int(rank + 4 * np.sqrt(rank) + 8))
    low, _ = _kth_largest(sample, rank)
    return max(low, 1), rank * n // size


@njit(nogil=True, cache=True)
def collect(bits, mask, low, found):
    """Fill `found` with the places of keys that reach `low`; returns their number, or -1 if they do not fit."""
    count, whole = 0, len(bits) // _BLOCK * _BLOCK
    for begin in range(0, whole, _BLOCK):
        hit = False
        for i in range(begin, begin + _BLOCK):
            hit |= (bits[i] & mask) >= low
        if hit:
            if count + _BLOCK > len(found):
                return -1
            for i in range(begin, begin + _BLOCK):
                found[count] = i
                count += (bits[i] & mask) >= low
    for i in range(whole, len(bits)):
        if (bits[i] & mask) >= low:
            if count == len(found):
                return -1
            found[count] = i
            count += 1
    return count


@njit(nogil=True, cache=True)
def _kth_largest(keys, k):
    """The k-th largest of non-negative keys, and how many are larger."""
    counts = np.empty(1 << _DIGIT_BITS, np.int64)
    width = keys.itemsize * 8 - 1
    high, above = np.int64(0), 0  # the digits known so far, and how many keys are larger than any that has them
    while width > 0:
        digit_bits = min(_DIGIT_BITS, width)
        rest = width - digit_bits
        counts[: 1 << digit_bits] = 0
        for i in range(len(keys)):
            key = np.int64(keys[i])
            if key >> width == high:
                counts[(key >> rest) & ((1 << digit_bits) - 1)] += 1
        digit = (1 << digit_bits) - 1
        while above + counts[digit] < k:
            above += counts[digit]
            digit -= 1
        high, width = (high << digit_bits) | digit, rest
    return high, above


@njit(nogil=True, cache=True)
def _topk_of_rows(bits, k):
    rows, width = bits.shape
    mask = np.iinfo(bits.dtype).max
    chosen = np.empty((rows, k), np.int64)
    keys = np.empty(width, bits.dtype)
    bound = np.empty(1, bits.dtype)  # an array, because a plain number would become 64 bits wide, and slow
    for row in range(rows):
        for i in range(width):
            keys[i] = bits[row, i] & mask
        # The largest number that k keys reach, bit by bit: rows are short, so this beats sorting them.
        least, above = 0, 0
        for bit in range(bits.itemsize * 8 - 2, -1, -1):
            bound[0] = least | (1 << bit)
            trial = bound[0]
            reach = 0
            for i in range(width):
                reach += keys[i] >= trial
            if reach >= k:
                least = np.int64(trial)
            else:
                above = reach
            if reach == k:  # no tie to break
                least, above = least - 1, k
                break
        ties, found = k - above, 0
        for i in range(width):
            if keys[i] > least:
                chosen[row, found] = i
                found += 1
            elif keys[i] == least and ties > 0:
                chosen[row, found] = i
                found += 1
                ties -= 1
    return chosen
