"""Whole numbers on a shared grid on a CPU. Imported only where numba is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit

from laconic.compression.kernels.numba_cpu.chunk import INFINITY, largest_bits, mix, uniform
from laconic.compression.wire.cuts import Cuts

if TYPE_CHECKING:
    from laconic.compression.kernels.shared_grid import Grid

_u32, _i32, _i64, _f32 = np.uint32, np.int32, np.int64, np.float32
_PIECE = 2**18
"""Elements widened to float32 at a time."""


@njit(cache=True, nogil=True)
def _encode(values, starts, seeds, seed, units, shifts, low, levels, codes, finite):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        if largest_bits(x) >= INFINITY:
            finite[chunk] = False
        _numbers(x, shifts[chunk], _inverse(units[chunk]), mix(_u32(seeds[chunk] ^ seed)), low, levels, out)


# A unit may be zero.
@njit(cache=True, nogil=True, error_model="numpy")
def _inverse(unit):
    return _f32(_f32(1) / unit)


@njit(cache=True, nogil=True)
def _numbers(x, shift, inverse, seed, low, levels, out):
    lowest, highest = _f32(low), _f32(low + levels)
    for i in range(len(x)):
        scaled = _f32(_f32(_f32(x[i] + shift) * inverse) + uniform(mix(_u32(_u32(i) + seed))))
        number = _f32(0) if np.isnan(scaled) else _f32(np.floor(scaled))
        out[i] = _i32(_f32(min(max(number, lowest), highest) - lowest))


@njit(cache=True, nogil=True)
def _decode(sums, starts, units, shifts, offset, count, out, squares):
    for chunk in range(len(starts) - 1):
        unit, back, total = units[chunk], _f32(_f32(count) * shifts[chunk]), _i64(0)
        for i in range(starts[chunk] - starts[0], starts[chunk + 1] - starts[0]):
            number = _i32(_i32(sums[i]) + offset)
            out[i] = _f32(_f32(_f32(number) * unit) - back)
            total += _i64(number) * _i64(number)
        squares[chunk] = total


def encode(
    flat: torch.Tensor, chunks: Cuts, grid: Grid, moment_seed: int, *, codes: torch.Tensor, finite: torch.Tensor
) -> None:
    """Fill `codes`, and mark chunks that are not finite."""
    units, shifts, written, known = grid.units.numpy(), grid.shifts.numpy(), codes.numpy(), finite.numpy()
    for some, elements in _pieces(chunks):
        values = flat[elements].detach().float().contiguous().numpy()
        starts = chunks.starts[some.start : some.stop + 1]
        places = values, starts, chunks.seeds[some], moment_seed, units[some], shifts[some]
        _encode(*places, grid.low, grid.levels, written[elements], known[some])


def decode(
    sums: torch.Tensor, count: int, chunks: Cuts, grid: Grid, *, out: torch.Tensor, squares: torch.Tensor
) -> None:
    """Fill `out` with values, and `squares` with sums of squares of whole numbers."""
    units, shifts, read, found = grid.units.numpy(), grid.shifts.numpy(), sums.numpy(), squares.numpy()
    for some, elements in _pieces(chunks):
        values = np.empty(elements.stop - elements.start, _f32)
        starts = chunks.starts[some.start : some.stop + 1]
        _decode(read[elements], starts, units[some], shifts[some], count * grid.low, count, values, found[some])
        out[elements].copy_(torch.from_numpy(values))


def _pieces(chunks: Cuts) -> list[tuple[slice, slice]]:
    """Ranges of chunks and of their elements, of about `_PIECE` elements each."""
    step = max(1, _PIECE // chunks.longest)
    found: list[tuple[slice, slice]] = []
    for first in range(0, chunks.num_chunks, step):
        last = min(first + step, chunks.num_chunks)
        found.append((slice(first, last), slice(int(chunks.starts[first]), int(chunks.starts[last]))))
    return found
