"""Whole numbers on a shared grid on a GPU: values are read once. Imported only where Triton is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.triton_gpu.codes import mix, uniform
from laconic.compression.wire.cuts import Cuts

if TYPE_CHECKING:
    from laconic.compression.kernels.shared_grid import Grid

_TILE = 1024
"""Elements of one program."""


@triton.jit
def _tile(starts, chunk, part, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """The first element of a part of a chunk, the columns of the part, and a mask of those that exist."""
    start = tl.load(starts + chunk)
    length = tl.load(starts + chunk + 1) - start
    if ALIGNED:
        # Then the compiler may move sixteen values at a time.
        start = tl.multiple_of(start, 16)
        length = tl.multiple_of(length, 16)
    column = part * TILE + tl.arange(0, TILE)
    return start, column, column < length


@triton.jit
def _encode(
    flat,
    starts,
    seeds,
    seed,
    units,
    shifts,
    lowest,
    highest,
    codes,
    finite,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    chunk = tl.program_id(0) // PARTS
    start, column, inside = _tile(starts, chunk, tl.program_id(0) % PARTS, TILE, ALIGNED)
    x = tl.load(flat + start + column, mask=inside, other=0.0).to(tl.float32)
    drawn = uniform(mix(column.to(tl.uint32) + mix((tl.load(seeds + chunk) ^ seed).to(tl.uint32))))
    inverse = tl.math.div_rn(1.0, tl.load(units + chunk))
    scaled = (x + tl.load(shifts + chunk)) * inverse + drawn
    number = tl.where(scaled == scaled, tl.floor(scaled), 0.0)
    code = tl.minimum(tl.maximum(number, lowest), highest) - lowest
    tl.store(codes + start + column, code.to(tl.int32).to(codes.dtype.element_ty), mask=inside)
    known = tl.min((tl.abs(x) <= 3.4028234663852886e38).to(tl.int32), axis=0)
    # Of several programs that share a chunk, any may find what the others do not.
    tl.store(finite + chunk, 0, mask=known == 0)


@triton.jit
def _decode(
    sums,
    starts,
    units,
    shifts,
    offset,
    count,
    out,
    squares,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    chunk = tl.program_id(0) // PARTS
    start, column, inside = _tile(starts, chunk, tl.program_id(0) % PARTS, TILE, ALIGNED)
    number = tl.load(sums + start + column, mask=inside, other=0).to(tl.int32) + offset
    value = number.to(tl.float32) * tl.load(units + chunk) - tl.load(shifts + chunk) * count
    tl.store(out + start + column, value.to(out.dtype.element_ty), mask=inside)
    wide = tl.where(inside, number, 0).to(tl.int64)
    tl.atomic_add(squares + chunk, tl.sum(wide * wide, axis=0))


def encode(
    flat: torch.Tensor, chunks: Cuts, grid: Grid, moment_seed: int, *, codes: torch.Tensor, finite: torch.Tensor
) -> None:
    """Fill `codes`, and mark chunks that are not finite."""
    parts = -(-min(chunks.longest, flat.numel()) // _TILE)
    _encode[(chunks.num_chunks * parts,)](
        flat,
        chunks.starts_tensor,
        chunks.seeds_tensor,
        moment_seed,
        grid.units,
        grid.shifts,
        float(grid.low),
        float(grid.low + grid.levels),
        codes,
        finite.view(torch.uint8),
        PARTS=parts,
        TILE=_TILE,
        ALIGNED=chunks.aligned,
        num_warps=2,
        # A product that is added must be rounded first, as everywhere else.
        enable_fp_fusion=False,
    )


def decode(
    sums: torch.Tensor, count: int, chunks: Cuts, grid: Grid, *, out: torch.Tensor, squares: torch.Tensor
) -> None:
    """Fill `out` with values, and `squares` with sums of squares of whole numbers."""
    parts = -(-min(chunks.longest, out.numel()) // _TILE)
    _decode[(chunks.num_chunks * parts,)](
        sums,
        chunks.starts_tensor,
        grid.units,
        grid.shifts,
        count * grid.low,
        float(count),
        out,
        squares,
        PARTS=parts,
        TILE=_TILE,
        ALIGNED=chunks.aligned,
        num_warps=2,
        enable_fp_fusion=False,
    )
