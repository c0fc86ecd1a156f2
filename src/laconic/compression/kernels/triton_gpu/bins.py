"""Entries that reach the largest magnitude of their bin on a GPU: values are read once, then only the entries.

Imported only where Triton is installed.
"""

from __future__ import annotations

import math

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import bins as reference
from laconic.compression.wire.cuts import Cuts

_LONGEST = 8192
"""Elements of the longest bin that one program keeps in registers."""
_PER_WARP = 512
"""Elements."""
_EXPECTED = 1 / 8
"""The share of entries for which memory is taken before their number is known."""


@triton.jit
def _mark(flat, residual, starts, marks, counts, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):
    chunk = tl.program_id(0)
    start = tl.multiple_of(tl.load(starts + chunk), ALIGNMENT)
    length = tl.multiple_of(tl.load(starts + chunk + 1) - start, ALIGNMENT)
    column = tl.arange(0, BLOCK)
    inside = column < length
    added = tl.load(flat + start + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32) + added
    # Sums are rounded to the dtype of the residual, as in plain torch.
    total = total.to(residual.dtype.element_ty).to(tl.float32)
    tl.store(residual + start + column, total.to(residual.dtype.element_ty), mask=inside)
    bits = tl.max(total.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    twice = (total + added).to(residual.dtype.element_ty).to(tl.float32)
    below = tl.abs(twice) < bits.to(tl.float32, bitcast=True)  # never true beside NaN
    reached = inside & (bits != 0) & (below == 0)
    tl.store(marks + start + column, reached.to(tl.uint8), mask=inside)
    tl.store(counts + chunk, tl.sum(reached.to(tl.int32), axis=0))


@triton.jit
def _take(
    residual,
    starts,
    marks,
    ends,
    counts,
    indices,
    values,
    first,
    last,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Of all marked entries, those numbered from `first` to `last` - 1."""
    chunk = tl.program_id(0)
    count = tl.load(counts + chunk)
    if count > 0:
        start = tl.multiple_of(tl.load(starts + chunk), ALIGNMENT)
        length = tl.multiple_of(tl.load(starts + chunk + 1) - start, ALIGNMENT)
        column = tl.arange(0, BLOCK)
        marked = tl.load(marks + start + column, mask=column < length, other=0).to(tl.int32)
        place = tl.load(ends + chunk) - count + tl.cumsum(marked, axis=0) - 1
        taken = (marked != 0) & (place >= first) & (place < last)
        value = tl.load(residual + start + column, mask=taken, other=0.0)
        tl.store(indices + place, start + column, mask=taken)
        tl.store(values + place, value, mask=taken)
        tl.store(residual + start + column, tl.zeros([BLOCK], residual.dtype.element_ty), mask=taken)


def take_reaching(flat: torch.Tensor, residual: torch.Tensor, bins: Cuts) -> tuple[torch.Tensor, torch.Tensor]:
    block = triton.next_power_of_2(min(bins.longest, max(flat.numel(), 1)))
    if flat.dtype.itemsize > 4 or block > _LONGEST or not bins.num_chunks:
        return reference.take_reaching(flat, residual, bins)
    flat, starts, grid = flat.contiguous(), bins.starts_tensor, (bins.num_chunks,)
    marks = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
    counts = torch.empty(bins.num_chunks, dtype=torch.int64, device=flat.device)
    shape = {"BLOCK": block, "ALIGNMENT": bins.alignment, "num_warps": max(1, block // _PER_WARP)}
    _mark[grid](flat, residual, starts, marks, counts, **shape)
    ends = counts.cumsum(0)
    room = math.ceil(_EXPECTED * flat.numel())
    indices = torch.empty(room, dtype=torch.int64, device=flat.device)
    values = torch.empty(room, dtype=residual.dtype, device=flat.device)
    _take[grid](residual, starts, marks, ends, counts, indices, values, 0, room, **shape)
    total = int(ends[-1])  # the host waits here
    if total > room:
        indices, values = (torch.cat((each, each.new_empty(total - room))) for each in (indices, values))
        _take[grid](residual, starts, marks, ends, counts, indices, values, room, total, **shape)
    return indices[:total], values[:total]
