"""Orthonormal bases of thin matrices on a GPU, in one kernel launch.

Programs share the rows and wait for each other between the steps. Every sum is made of the same parts in the same order
each time. Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import lowrank as reference
from laconic.compression.kernels.triton_gpu.grid_barrier import WARPS, num_programs, wait_for_all

_HIGHEST_RANK = 16
"""More columns are left to plain torch: their products would not fit into registers."""
_PRODUCTS = 4096
"""Entries of all Gram matrices that a program has in registers."""


def orthonormal(columns: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    batch, rows, rank = columns.shape
    if columns.dtype != torch.float32 or rank > _HIGHEST_RANK or not columns.numel():
        return reference.orthonormal(columns, noise)
    columns = columns.contiguous()
    out = torch.empty_like(columns)
    padded = triton.next_power_of_2(rank)
    block = min(512, _PRODUCTS // padded**2)
    most = num_programs(columns.device)
    rows_each = triton.cdiv(triton.cdiv(rows, block), max(1, most // batch)) * block
    parts_each = triton.cdiv(rows, rows_each)
    num_parts = batch * parts_each
    _orthonormal[(min(most, num_parts),)](
        columns,
        noise,
        out,
        torch.empty(num_parts * (1 + 2 * padded**2), dtype=torch.float64, device=columns.device),
        torch.zeros(1, dtype=torch.int32, device=columns.device),
        rows,
        rank,
        rows_each,
        parts_each,
        num_parts,
        torch.finfo(torch.float32).eps / noise.numel() ** 0.5,
        RANK=padded,
        BLOCK=block,
        SHIFT=reference.SHIFT,
        num_warps=WARPS,
        launch_cooperative_grid=True,
    )
    return out


@triton.jit
def _noisy(columns, noise, begin, end, rank, size, weight, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Some rows of  columns / size + weight * noise."""
    row, column = begin + tl.arange(0, BLOCK), tl.arange(0, RANK)
    place = row[:, None] * rank + column[None, :]
    inside = (row < end)[:, None] & (column < rank)[None, :]
    values = tl.load(columns + place, mask=inside, other=0.0).to(tl.float64)
    return values / size + (weight * tl.load(noise + place, mask=inside, other=0.0)).to(tl.float64)


@triton.jit
def _times(x, inverse):
    """The rows of x times the transposed inverse."""
    return tl.sum(x[:, None, :] * inverse[None, :, :], axis=2)


@triton.jit
def _inverse_factor(gram, rank, RANK: tl.constexpr, SHIFT: tl.constexpr):
    """L^-1, where L L^T = gram + shift, by elimination; the identity for padded rows and columns."""
    row, column = tl.arange(0, RANK)[:, None], tl.arange(0, RANK)[None, :]
    on_diagonal = row == column
    trace = tl.sum(tl.sum(tl.where(on_diagonal, gram, 0.0), axis=1), axis=0)
    rest = tl.where(on_diagonal, tl.where(row < rank, gram + SHIFT * trace, 1.0), gram)
    inverse = tl.where(on_diagonal, 1.0, 0.0).to(tl.float64) + 0.0 * gram
    for i in range(RANK):
        pivot_row = tl.sum(tl.where(row == i, rest, 0.0), axis=0)
        pivot_column = tl.sum(tl.where(column == i, rest, 0.0), axis=1)
        inverse_row = tl.sum(tl.where(row == i, inverse, 0.0), axis=0)
        pivot = tl.sum(tl.where(tl.arange(0, RANK) == i, pivot_row, 0.0), axis=0)
        factor = tl.where(row > i, (pivot_column / pivot)[:, None], 0.0)
        rest -= factor * pivot_row[None, :]
        inverse -= factor * inverse_row[None, :]
    diagonal = tl.sum(tl.where(on_diagonal, rest, 0.0), axis=1)
    return inverse / tl.sqrt(diagonal)[:, None]


@triton.jit
def _gram(x):
    return x[:, :, None] * x[:, None, :]


@triton.jit
def _size(norms, part, parts_each):
    """The norm of the matrix that a part belongs to; 1 if it is zero."""
    first = part // parts_each * parts_each
    squares = tl.zeros((64,), tl.float64)
    for begin in range(0, parts_each, 64):
        other = begin + tl.arange(0, 64)
        squares += tl.load(norms + first + other, mask=other < parts_each, other=0.0, cache_modifier=".cg")
    size = tl.sqrt(tl.sum(squares, axis=0))
    # Not "larger than zero": NaN must stay.
    return tl.where(size == 0.0, 1.0, size)


@triton.jit
def _total(grams, part, parts_each, RANK: tl.constexpr):
    """The Gram matrix of the matrix that a part belongs to."""
    first = part // parts_each * parts_each
    entry = tl.arange(0, RANK)[None, :, None] * RANK + tl.arange(0, RANK)[None, None, :]
    total = tl.zeros((16, RANK, RANK), tl.float64)
    for begin in range(0, parts_each, 16):
        other = begin + tl.arange(0, 16)[:, None, None]
        place = (first + other) * (RANK * RANK) + entry
        total += tl.load(grams + place, mask=(other < parts_each) & (entry >= 0), other=0.0, cache_modifier=".cg")
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["rows_each", "parts_each", "num_parts"])
def _orthonormal(
    columns,
    noise,
    out,
    table,
    arrived,
    rows,
    rank,
    rows_each,
    parts_each,
    num_parts,
    weight,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    norms, grams = table, table + num_parts
    others = grams + num_parts * RANK * RANK
    entry = tl.arange(0, RANK)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    for part in range(program, num_parts, programs):
        x = columns + (part // parts_each).to(tl.int64) * rows * rank
        begin = part % parts_each * rows_each
        end = tl.minimum(begin + rows_each, rows)
        squares = tl.zeros((BLOCK, RANK), tl.float64)
        for start in range(begin, end, BLOCK):
            row, column = start + tl.arange(0, BLOCK), tl.arange(0, RANK)
            inside = (row < end)[:, None] & (column < rank)[None, :]
            values = tl.load(x + row[:, None] * rank + column[None, :], mask=inside, other=0.0).to(tl.float64)
            squares += values * values
        tl.store(norms + part, tl.sum(tl.sum(squares, axis=1), axis=0))
    wait_for_all(arrived, programs)

    for part in range(program, num_parts, programs):
        x = columns + (part // parts_each).to(tl.int64) * rows * rank
        begin = part % parts_each * rows_each
        end = tl.minimum(begin + rows_each, rows)
        size = _size(norms, part, parts_each)
        products = tl.zeros((BLOCK, RANK, RANK), tl.float64)
        for start in range(begin, end, BLOCK):
            products += _gram(_noisy(x, noise, start, end, rank, size, weight, RANK, BLOCK))
        tl.store(grams + part * RANK * RANK + entry, tl.sum(products, axis=0))
    wait_for_all(arrived, 2 * programs)

    for part in range(program, num_parts, programs):
        x = columns + (part // parts_each).to(tl.int64) * rows * rank
        begin = part % parts_each * rows_each
        end = tl.minimum(begin + rows_each, rows)
        size = _size(norms, part, parts_each)
        first = _inverse_factor(_total(grams, part, parts_each, RANK), rank, RANK, SHIFT)
        products = tl.zeros((BLOCK, RANK, RANK), tl.float64)
        for start in range(begin, end, BLOCK):
            products += _gram(_times(_noisy(x, noise, start, end, rank, size, weight, RANK, BLOCK), first))
        tl.store(others + part * RANK * RANK + entry, tl.sum(products, axis=0))
    wait_for_all(arrived, 3 * programs)

    for part in range(program, num_parts, programs):
        x = columns + (part // parts_each).to(tl.int64) * rows * rank
        begin = part % parts_each * rows_each
        end = tl.minimum(begin + rows_each, rows)
        size = _size(norms, part, parts_each)
        first = _inverse_factor(_total(grams, part, parts_each, RANK), rank, RANK, SHIFT)
        second = _inverse_factor(_total(others, part, parts_each, RANK), rank, RANK, SHIFT)
        for start in range(begin, end, BLOCK):
            basis = _times(_noisy(x, noise, start, end, rank, size, weight, RANK, BLOCK), first)
            basis = _times(basis, second).to(tl.float32)
            row, column = start + tl.arange(0, BLOCK), tl.arange(0, RANK)
            inside = (row < end)[:, None] & (column < rank)[None, :]
            place = (part // parts_each).to(tl.int64) * rows * rank + row[:, None] * rank + column[None, :]
            tl.store(out + place, basis, mask=inside)
