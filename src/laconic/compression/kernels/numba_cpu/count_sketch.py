"""Count sketches on a CPU: cells and signs are computed where they are needed.

Imported only where numba is installed.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from laconic.compression.kernels.numba_cpu.chunk import mix

_u32, _u64, _f32 = np.uint32, np.uint64, np.float32


@njit(cache=True, nogil=True)
def _sketch(values, seeds, columns, cells):
    for row in range(len(seeds)):
        seed, own = _u32(seeds[row]), cells[row * columns : (row + 1) * columns]
        for i in range(len(values)):
            number = mix(_u32(_u32(i) + seed))
            cell = (_u64(number >> _u32(1)) * _u64(columns)) >> _u64(31)
            own[cell] = _f32(own[cell] - values[i]) if number & _u32(1) else _f32(own[cell] + values[i])


@njit(cache=True, nogil=True)
def _estimate(cells, seeds, columns, values):
    rows = len(seeds)
    found = np.empty(rows, np.float32)
    for i in range(len(values)):
        unknown = False
        for row in range(rows):
            number = mix(_u32(_u32(i) + _u32(seeds[row])))
            value = cells[row * columns + np.int64((_u64(number >> _u32(1)) * _u64(columns)) >> _u64(31))]
            value = _f32(-value) if number & _u32(1) else value
            unknown |= np.isnan(value)
            at = row
            while at > 0 and found[at - 1] > value:
                found[at] = found[at - 1]
                at -= 1
            found[at] = value
        values[i] = np.nan if unknown else found[(rows - 1) // 2]


def sketch(values: torch.Tensor, seeds: torch.Tensor, cells: torch.Tensor) -> None:
    _sketch(values.detach().contiguous().numpy(), seeds.numpy(), len(cells) // len(seeds), cells.numpy())


def estimate(cells: torch.Tensor, seeds: torch.Tensor, values: torch.Tensor) -> None:
    _estimate(cells.contiguous().numpy(), seeds.numpy(), len(cells) // len(seeds), values.numpy())
