"""Randomized Hadamard transforms on a CPU, each in the cache. Imported only where numba is installed."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from laconic.compression.kernels.numba_cpu.chunk import mix, sum_of_squares
from laconic.compression.wire.rotation import Rotation

_u32, _i32, _f32 = np.uint32, np.int32, np.float32


@njit(cache=True, nogil=True)
def _change_signs(x, seed):
    for start in range(0, len(x), 32):
        number, part = mix(_u32(_u32(start // 32) + seed)), x[start : start + 32]
        for i in range(len(part)):
            part[i] *= _f32(1 - 2 * _i32((number >> _u32(i)) & _u32(1)))


@njit(cache=True, nogil=True)
def _hadamard(x):
    half = 1
    while half < len(x):
        for start in range(0, len(x), 2 * half):
            low, high = x[start : start + half], x[start + half : start + 2 * half]
            for i in range(half):
                first, second = low[i], high[i]
                low[i] = _f32(first + second)
                high[i] = _f32(first - second)
        half *= 2
    factor = _f32(len(x) ** -0.5)
    for i in range(len(x)):
        x[i] = _f32(x[i] * factor)


@njit(cache=True, nogil=True)
def _sums_of_squares(values, starts, squares):
    for block in range(len(starts) - 1):
        squares[block] = sum_of_squares(values[starts[block] : starts[block + 1]])


@njit(cache=True, nogil=True)
def _forward(values, starts, seeds, seed):
    for block in range(len(starts) - 1):
        x = values[starts[block] : starts[block + 1]]
        _change_signs(x, mix(_u32(seeds[block] ^ seed)))
        _hadamard(x)


@njit(cache=True, nogil=True)
def _backward(values, starts, seeds, seed):
    for block in range(len(starts) - 1):
        x = values[starts[block] : starts[block + 1]]
        _hadamard(x)
        _change_signs(x, mix(_u32(seeds[block] ^ seed)))


def sums_of_squares(flat: torch.Tensor, rotation: Rotation, squares: torch.Tensor) -> None:
    """Fill `squares` with the sum of each block."""
    _sums_of_squares(flat.float().numpy(), rotation.starts, squares.numpy())


def forward(flat: torch.Tensor, rotation: Rotation, seed: int, rotated: torch.Tensor) -> None:
    """Fill `rotated`."""
    rotated.copy_(flat)
    _forward(rotated.numpy(), rotation.starts, rotation.seeds, seed)


def backward(values: torch.Tensor, rotation: Rotation, seed: int, out: torch.Tensor) -> None:
    """Fill `out` with every block rotated back."""
    rotated = out if out.dtype == torch.float32 else torch.empty_like(values)
    rotated.copy_(values)
    _backward(rotated.numpy(), rotation.starts, rotation.seeds, seed)
    if rotated is not out:
        out.copy_(rotated)
