"""The sum of rows of floating-point numbers on a GPU: each is read once, and the sum is written once.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import row_sums as reference

_TILE = 1024
"""Values of one program; chosen by measurement on an H200."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _sum(rows, stride, num_rows, out, numel, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    total = tl.load(rows + at, mask=inside, other=0.0).to(out.dtype.element_ty)
    for _ in range(1, num_rows):
        rows += stride
        values = tl.load(rows + at, mask=inside, other=0.0).to(out.dtype.element_ty)
        # Added in float32, then rounded, as torch does it.
        total = (total.to(tl.float32) + values.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + at, total, mask=inside)


def sum_of_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the sum of all rows, in their order."""
    if rows.dtype not in _DTYPES or out.dtype not in _DTYPES or rows.stride(1) != 1 or not out.is_contiguous():
        reference.sum_of_rows(rows, out)
        return
    _sum[(-(-out.numel() // _TILE),)](rows, rows.stride(0), len(rows), out, out.numel(), TILE=_TILE)
