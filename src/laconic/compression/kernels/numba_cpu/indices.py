"""Bitmaps and Elias-Fano codes on a CPU: the bytes of wire/indices.py. Imported only where numba is installed."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit


def encode_bitmap(indices: torch.Tensor, packed: torch.Tensor) -> None:
    """Set bit i of `packed`, which is zero, for every index i."""
    _set_bits(indices.numpy(), packed.numpy())


def decode_bitmap(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The places of the k bits that are set."""
    return torch.from_numpy(_find_bits(packed.numpy(), k))


def encode_packed(indices: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """Fill `packed`, which is zero, with `bits` low bits of each index and the rest in unary."""
    _write_packed(indices.numpy(), packed.numpy(), bits)


def decode_packed(packed: torch.Tensor, k: int, bits: int) -> torch.Tensor:
    """Decode the k indices."""
    return torch.from_numpy(_read_packed(packed.numpy(), k, bits))


@njit(nogil=True, cache=True)
def _set_bits(places, packed):
    for place in places:
        packed[place >> 3] |= np.uint8(1 << (place & 7))


@njit(nogil=True, cache=True)
def _find_bits(packed, k):
    places = np.empty(k, np.int64)
    found = 0
    for number in range(len(packed)):
        byte = packed[number]
        bit = number * 8
        while byte and found < k:
            if byte & 1:
                places[found] = bit
                found += 1
            byte >>= 1
            bit += 1
    return places


@njit(nogil=True, cache=True)
def _write_packed(indices, packed, bits):
    k = len(indices)
    mask = (1 << bits) - 1
    waiting, num_waiting, byte = np.int64(0), 0, 0
    for index in indices:
        waiting |= (index & mask) << num_waiting
        num_waiting += bits
        while num_waiting >= 8:
            packed[byte] = waiting & 255
            waiting >>= 8
            num_waiting -= 8
            byte += 1
    if num_waiting:
        packed[byte] = waiting & 255
        byte += 1
    for i in range(k):
        place = (indices[i] >> bits) + i
        packed[byte + (place >> 3)] |= np.uint8(1 << (place & 7))


@njit(nogil=True, cache=True)
def _read_packed(packed, k, bits):
    high_begin = (k * bits + 7) // 8
    indices = _find_bits(packed[high_begin:], k)
    mask = (1 << bits) - 1
    waiting, num_waiting, byte = np.int64(0), 0, 0
    for i in range(k):
        while num_waiting < bits:
            waiting |= np.int64(packed[byte]) << num_waiting
            num_waiting += 8
            byte += 1
        indices[i] = ((indices[i] - i) << bits) | (waiting & mask)
        waiting >>= bits
        num_waiting -= bits
    return indices
