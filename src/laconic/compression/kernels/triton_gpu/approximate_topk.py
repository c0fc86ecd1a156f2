"""About the k largest magnitudes on a GPU: the two passes of `selection`, with thresholds from fitted exponentials.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch

from laconic.compression.kernels.reference import approximate_topk as reference
from laconic.compression.kernels.triton_gpu.grid_barrier import num_programs
from laconic.compression.kernels.triton_gpu.selection import MOST, plan_selection, select
from laconic.compression.kernels.triton_gpu.thresholds import fit
from laconic.compression.kernels.triton_gpu.topk import topk_indices


def approximate_topk(values: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    n = values.numel()
    if values.dtype.itemsize > 4 or n > MOST:
        return reference.approximate_topk(values, k, seed)
    if not reference.is_estimated(n, k):
        return topk_indices(values, k)
    values = values.to(torch.float32).contiguous()
    selection = plan_selection(n, k, True, num_programs(values.device))
    work = selection.table(values.device)
    fit[(1,)](values, work, n, k, SIZE=reference.SAMPLE, num_warps=16)
    return select(values.view(torch.int32), k, seed, work, selection, 31, estimate=True)
