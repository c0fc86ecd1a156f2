"""The k largest magnitudes on a GPU, in one read of the values and without the host waiting for anything.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch

from laconic.compression.kernels.reference import topk as reference
from laconic.compression.kernels.triton_gpu.grid_barrier import num_programs
from laconic.compression.kernels.triton_gpu.rows import topk_of_rows
from laconic.compression.kernels.triton_gpu.selection import MOST, SAMPLE, SMALL, plan_selection, select
from laconic.compression.kernels.triton_gpu.thresholds import sample

__all__ = ["topk_indices", "topk_of_rows"]

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32}
_SHARE = 4
"""Where more than one in four values is wanted, the collected ones would take as much memory as the values."""
_DIGITS = 16
"""Bits of a bound that are computed from the sample: a bound need not be tight."""


def topk_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending indices of the k largest magnitudes of `values` (one dimension); of equal magnitudes, the first."""
    n = values.numel()
    if k in (0, n):
        return torch.arange(k, device=values.device)
    if values.dtype.itemsize not in _WHOLE_NUMBERS or n > MOST or (n > SMALL and k > n // _SHARE):
        return reference.topk_indices(values, k)
    bits = values.contiguous().view(_WHOLE_NUMBERS[values.dtype.itemsize])
    selection = plan_selection(n, k, False, num_programs(values.device))
    work = selection.table(values.device)
    width = 8 * values.dtype.itemsize - 1
    if selection.sampled:
        constants = {"LARGEST": 2**width - 1, "WIDTH": width, "REST": max(0, width - _DIGITS), "SIZE": SAMPLE}
        sample[(1,)](bits, work, n, selection.rank_low, selection.rank_high, **constants, num_warps=8)
    return select(bits, k, 0, work, selection, width, estimate=False)
