"""Entries that reach the largest magnitude of their bin on a CPU: two short loops over each bin.

Imported only where numba is installed.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from laconic.compression.kernels.numba_cpu.chunk import INFINITY, largest_bits
from laconic.compression.kernels.reference import bins as reference
from laconic.compression.wire.cuts import Cuts

_u32, _f32 = np.uint32, np.float32


@njit(cache=True, nogil=True)
def _add(flat, residual):
    for i in range(len(flat)):
        residual[i] = _f32(residual[i] + flat[i])


@njit(cache=True, nogil=True)
def _take(flat, residual, starts, places, values):
    """Fill `places` and `values`; returns how many were taken."""
    taken = 0
    for chunk in range(len(starts) - 1):
        begin, end = starts[chunk], starts[chunk + 1]
        _add(flat[begin:end], residual[begin:end])
        bits = largest_bits(residual[begin:end])
        if bits == _u32(0):
            continue
        largest = np.nan if bits > INFINITY else _u32(bits).view(_f32)
        for i in range(begin, end):
            if not abs(_f32(residual[i] + flat[i])) < largest:
                places[taken] = i
                values[taken] = residual[i]
                residual[i] = _f32(0)
                taken += 1
    return taken


def take_reaching(flat: torch.Tensor, residual: torch.Tensor, bins: Cuts) -> tuple[torch.Tensor, torch.Tensor]:
    if flat.dtype != torch.float32:
        return reference.take_reaching(flat, residual, bins)
    # All entries may be taken, but memory that is never written is never used.
    places, values = torch.empty(flat.numel(), dtype=torch.int64), torch.empty_like(residual)
    given = flat.detach().contiguous().numpy()
    taken = _take(given, residual.numpy(), bins.starts, places.numpy(), values.numpy())
    return places[:taken].clone(), values[:taken].clone()
