"""Random numbers that depend only on step, parameter, rank and position.

The same few operations on 32-bit whole numbers give them in plain torch, in numba and in Triton, so every kernel rounds
alike, a run can be repeated bit for bit, and no generator has to be saved.

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16       (modulo 2^32)
    seed of a chunk = mix(base ^ moment_seed),    number i of it = mix(i + seed),    uniform = (number >> 8) / 2^24

Reference: Wellons 2018, "Prospecting for hash functions" (lowbias32).
"""

from __future__ import annotations

import zlib

import torch

from laconic.core.moment import Moment

_MASK = 0xFFFFFFFF


def mix(value: int) -> int:
    """A 32-bit number that looks random and is the same for the same `value`."""
    value &= _MASK
    value ^= value >> 16
    value = value * 0x7FEB352D & _MASK
    value ^= value >> 15
    value = value * 0x846CA68B & _MASK
    return value ^ value >> 16


def mix_tensor(values: torch.Tensor) -> torch.Tensor:
    """`mix` of every entry of an int64 tensor."""
    values = values & _MASK
    values = values ^ (values >> 16)
    values = values * 0x7FEB352D & _MASK
    values = values ^ (values >> 15)
    values = values * 0x846CA68B & _MASK
    return values ^ (values >> 16)


def base_seed(name: str, position: int) -> int:
    """The seed of one position of one parameter, in whatever bucket it is exchanged."""
    return mix(zlib.crc32(name.encode()) + mix(position))


def moment_seed(moment: Moment, *, shared: bool = False) -> int:
    """The seed of one step of one rank; `shared`: the same on every rank."""
    rank = 0 if shared else moment.rank + 1
    return mix(mix(moment.step + 1) ^ mix(rank * 0x9E3779B1))


def uniform(numbers: torch.Tensor) -> torch.Tensor:
    """32-bit numbers as float32 in [0, 1), multiples of 2^-24."""
    return (numbers >> 8).to(torch.float32) * 2.0**-24
