"""Entries that reach the largest magnitude of their bin on a GPU: values are read once.

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
_SLOTS = 1024
"""Entries that one program gathers."""
_EXPECTED = 1 / 8
"""The share of entries for which memory is taken before their number is known, for each bin and for all of them."""


@triton.jit
def _select(
    flat,
    residual,
    starts,
    counts,
    columns,
    values,
    marks,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Move the entries of a bin from the residual to the bin's memory; mark them where they are more than its room."""
    chunk = tl.program_id(0)
    start = tl.multiple_of(tl.load(starts + chunk), ALIGNMENT)
    length = tl.multiple_of(tl.load(starts + chunk + 1) - start, ALIGNMENT)
    column = tl.arange(0, BLOCK)
    inside = column < length
    added = tl.load(flat + start + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32) + added
    # Sums are rounded to the dtype of the residual, as in plain torch.
    total = total.to(residual.dtype.element_ty).to(tl.float32)
    bits = tl.max(total.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    twice = (total + added).to(residual.dtype.element_ty).to(tl.float32)
    below = tl.abs(twice) < bits.to(tl.float32, bitcast=True)  # never true beside NaN
    reached = (inside & (bits != 0) & (below == 0)).to(tl.int32)
    number = tl.cumsum(reached, axis=0)
    count = tl.sum(reached, axis=0)
    tl.store(counts + chunk, count)
    place = tl.where(count <= ROOM, chunk.to(tl.int64) * ROOM + number - 1, -1)
    moved = (reached != 0) & (place >= 0)
    tl.store(columns + place, column.to(tl.int16), mask=moved)
    tl.store(values + place, total.to(values.dtype.element_ty), mask=moved)
    left = tl.where(moved, 0.0, total)
    tl.store(residual + start + column, left.to(residual.dtype.element_ty), mask=inside)
    tl.store(marks + start + column, reached.to(tl.uint8), mask=inside & (place < 0))


@triton.jit
def _gather(
    residual,
    starts,
    ends,
    counts,
    columns,
    kept,
    marks,
    indices,
    values,
    num_chunks,
    first,
    last,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Of all selected entries, those numbered from `first` to `last` - 1."""
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    exists = chunk < num_chunks
    count = tl.load(counts + chunk, mask=exists, other=0)
    before = tl.load(ends + chunk, mask=exists, other=0) - count
    number = tl.arange(0, ROOM)[None, :]
    slot, place = chunk.to(tl.int64)[:, None] * ROOM + number, before[:, None] + number
    within = tl.where(count <= ROOM, count, 0)
    taken = (number < within[:, None]) & (place >= first) & (place < last)
    start = tl.load(starts + chunk, mask=exists, other=0)
    column = tl.load(columns + slot, mask=taken, other=0)
    tl.store(indices + place, start[:, None] + column.to(tl.int64), mask=taken)
    tl.store(values + place, tl.load(kept + slot, mask=taken, other=0.0), mask=taken)
    if tl.max(count, axis=0) > ROOM:
        for each in range(CHUNKS):
            _gather_marked(
                residual,
                starts,
                ends,
                counts,
                marks,
                indices,
                values,
                tl.program_id(0) * CHUNKS + each,
                num_chunks,
                first,
                last,
                ROOM,
                BLOCK,
                ALIGNMENT,
            )


@triton.jit
def _gather_marked(
    residual,
    starts,
    ends,
    counts,
    marks,
    indices,
    values,
    chunk,
    num_chunks,
    first,
    last,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Take the entries of one bin from the residual, if they are more than its room."""
    count = tl.load(counts + chunk, mask=chunk < num_chunks, other=0)
    if count > ROOM:
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
    room = max(1, math.floor(_EXPECTED * block))
    counts = flat.new_empty(bins.num_chunks, dtype=torch.int32)
    columns = flat.new_empty(bins.num_chunks * room, dtype=torch.int16)
    kept = residual.new_empty(bins.num_chunks * room)
    marks = flat.new_empty(flat.numel(), dtype=torch.uint8)
    shape = {"ROOM": room, "BLOCK": block, "ALIGNMENT": bins.alignment, "num_warps": max(1, block // _PER_WARP)}
    _select[grid](flat, residual, starts, counts, columns, kept, marks, **shape)
    ends = counts.cumsum(0, dtype=torch.int64)
    expected = math.ceil(_EXPECTED * flat.numel())
    indices = flat.new_empty(expected, dtype=torch.int64)
    values = residual.new_empty(expected)
    selected = (residual, starts, ends, counts, columns, kept, marks)
    together = max(1, _SLOTS // room)
    shape, groups = {**shape, "CHUNKS": together, "num_warps": 4}, (-(-bins.num_chunks // together),)
    # The host learns the number of entries while the device gathers them.
    number, known = torch.empty(1, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
    number.copy_(ends[-1:], non_blocking=True)
    known.record()
    _gather[groups](*selected, indices, values, bins.num_chunks, 0, expected, **shape)
    known.synchronize()
    total = int(number)
    if total > expected:
        indices, values = (torch.cat((each, each.new_empty(total - expected))) for each in (indices, values))
        _gather[groups](*selected, indices, values, bins.num_chunks, expected, total, **shape)
    return indices[:total], values[:total]
