"""Integers in 64-bit words on a CPU. Imported only where numba is installed."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

_u64, _i64 = np.uint64, np.int64


@njit(cache=True, nogil=True)
def _pack(numbers, words, shift):
    for i in range(len(numbers)):
        words[i] |= _u64(numbers[i]) << shift


@njit(cache=True, nogil=True)
def _unpack(words, numbers, shift, mask):
    for i in range(len(numbers)):
        numbers[i] = (words[i] >> shift) & mask


def pack(numbers: torch.Tensor, words: torch.Tensor, bits: int) -> None:
    """Fill `words` with all numbers; lanes do not overlap, so there is nothing to carry."""
    words.zero_()
    for lane, run in enumerate(numbers.split(len(words))):
        _pack(run.numpy(), words.numpy().view(np.uint64), _u64(bits * lane))


def unpack(words: torch.Tensor, numbers: torch.Tensor, bits: int) -> None:
    """Fill `numbers` with the contents of all lanes."""
    for lane, run in enumerate(numbers.split(len(words))):
        _unpack(words.numpy().view(np.uint64), run.numpy(), _u64(bits * lane), _u64((1 << bits) - 1))
