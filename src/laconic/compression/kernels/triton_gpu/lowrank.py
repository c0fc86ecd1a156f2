"""Products with thin matrices on a GPU, each in one read or one write of the large one.

Sums are accumulated in float32 by multiply-adds, never in TF32. Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import lowrank as reference
from laconic.compression.kernels.triton_gpu.orthonormal import orthonormal as orthonormal

_LARGE = 1 << 22
"""Entries; products with a smaller matrix are left to cuBLAS, which the host launches faster."""
_HIGHEST_RANK = 8
"""Columns; for more, cuBLAS reads the large matrix once, and kernels here would read it once per four."""
_HIGHEST_PRODUCT_RANK = 16
_FEW_ROWS = 256
"""A program takes whole rows, so fewer rows would leave most of a GPU idle."""
_RIGHT = {"ROWS": 2, "BLOCK": 512, "num_warps": 2}
_NARROW_RIGHT = {"ROWS": 2, "BLOCK": 256, "num_warps": 1}
_LEFT = {"ROWS": 4, "BLOCK": 512, "num_warps": 4}
_PRODUCT = {"ROWS": 4, "BLOCK": 512, "num_warps": 4}
"""The tile of one program; these tiles and the numbers below were chosen by measurement on an H200."""
_PROGRAMS = 640
"""Programs that sum columns: each sums a part of the rows, then the parts are added in order, deterministically."""


def times_right(matrix: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    if not _is_for_us(matrix, q, out) or len(matrix) < _FEW_ROWS:
        reference.times_right(matrix, q, out)
        return
    rows, columns, rank = *matrix.shape, len(q)
    shape = _RIGHT if columns > 1024 else _NARROW_RIGHT
    grid = triton.cdiv(rows, shape["ROWS"]), triton.cdiv(rank, 4)
    _right[grid](matrix, q, out, rows, columns // 4, columns, rank, QUARTERS=columns % 4 == 0, **shape)


def times_left(matrix: torch.Tensor, p: torch.Tensor, out: torch.Tensor) -> None:
    if not _is_for_us(matrix, p, out):
        reference.times_left(matrix, p, out)
        return
    rows, columns, rank = *matrix.shape, p.shape[1]
    blocks = triton.cdiv(columns, _LEFT["BLOCK"])
    each = triton.cdiv(rows, max(1, _PROGRAMS // blocks) * _LEFT["ROWS"]) * _LEFT["ROWS"]
    num_parts = triton.cdiv(rows, each)
    parts = torch.empty((num_parts, rank, columns), dtype=torch.float32, device=matrix.device)
    grid = blocks, num_parts, triton.cdiv(rank, 4)
    _left[grid](matrix, p, parts, rows, columns // 4, columns, rank, each, QUARTERS=columns % 4 == 0, **_LEFT)
    torch.sum(parts, 0, out=out)


def product(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    contiguous = p.is_contiguous() and q.is_contiguous() and out.is_contiguous()
    if out.numel() < _LARGE or len(q) > _HIGHEST_PRODUCT_RANK or p.dtype != torch.float32 or not contiguous:
        reference.product(p, q, out)
        return
    rows, columns, rank = *out.shape, len(q)
    # In one dimension: others have no more than 65535 programs.
    grid = (triton.cdiv(columns, _PRODUCT["BLOCK"]) * triton.cdiv(rows, _PRODUCT["ROWS"]),)
    _product[grid](p, q, out, rows, columns // 4, columns, RANK=rank, QUARTERS=columns % 4 == 0, **_PRODUCT)


def _is_for_us(matrix: torch.Tensor, thin: torch.Tensor, out: torch.Tensor) -> bool:
    contiguous = matrix.is_contiguous() and thin.is_contiguous() and out.is_contiguous()
    is_thin = min(thin.shape) <= _HIGHEST_RANK
    return matrix.numel() >= _LARGE and is_thin and matrix.dtype == thin.dtype == torch.float32 and contiguous


@triton.jit
def _if_less(number, limit, size):
    """`size` if the number is below the limit, else 0."""
    return tl.where(number < limit, size, 0)


@triton.jit
def _right(
    matrix,
    q,
    out,
    rows,
    quarter,
    columns,
    rank,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUARTERS: tl.constexpr,
):
    """Four columns of P = M Q^T for a few rows of M."""
    if QUARTERS:
        # Then the compiler knows that it may move four values at a time.
        columns = quarter * 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * 4
    starts = matrix + row[:, None].to(tl.int64) * columns
    zeros = tl.zeros((ROWS, BLOCK), tl.float32)
    sum0, sum1, sum2, sum3 = zeros, zeros, zeros, zeros
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        values = tl.load(starts + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        at = q + first * columns + column
        sum0 += values * tl.load(at, mask=inside, other=0.0)[None, :]
        sum1 += values * tl.load(at + columns, mask=column < _if_less(first + 1, rank, columns), other=0.0)[None, :]
        sum2 += values * tl.load(at + 2 * columns, mask=column < _if_less(first + 2, rank, columns), other=0.0)[None, :]
        sum3 += values * tl.load(at + 3 * columns, mask=column < _if_less(first + 3, rank, columns), other=0.0)[None, :]
    at = out + row * rank + first
    tl.store(at, tl.sum(sum0, axis=1), mask=row < rows)
    tl.store(at + 1, tl.sum(sum1, axis=1), mask=row < _if_less(first + 1, rank, rows))
    tl.store(at + 2, tl.sum(sum2, axis=1), mask=row < _if_less(first + 2, rank, rows))
    tl.store(at + 3, tl.sum(sum3, axis=1), mask=row < _if_less(first + 3, rank, rows))


@triton.jit
def _left(
    matrix,
    p,
    parts,
    rows,
    quarter,
    columns,
    rank,
    each,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUARTERS: tl.constexpr,
):
    """Four rows of P^T M for some columns, added up over `each` rows of M."""
    if QUARTERS:
        columns = quarter * 4
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    first = tl.program_id(2) * 4
    zeros = tl.zeros((ROWS, BLOCK), tl.float32)
    sum0, sum1, sum2, sum3 = zeros, zeros, zeros, zeros
    start = tl.program_id(1) * each
    for begin in range(start, tl.minimum(start + each, rows), ROWS):
        row = begin + tl.arange(0, ROWS)
        there = row < rows
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        values = tl.load(matrix + place, mask=there[:, None] & inside[None, :], other=0.0)
        at = p + row * rank + first
        sum0 += values * tl.load(at, mask=there, other=0.0)[:, None]
        sum1 += values * tl.load(at + 1, mask=row < _if_less(first + 1, rank, rows), other=0.0)[:, None]
        sum2 += values * tl.load(at + 2, mask=row < _if_less(first + 2, rank, rows), other=0.0)[:, None]
        sum3 += values * tl.load(at + 3, mask=row < _if_less(first + 3, rank, rows), other=0.0)[:, None]
    at = parts + (tl.program_id(1) * rank + first) * columns + column
    tl.store(at, tl.sum(sum0, axis=0), mask=inside)
    tl.store(at + columns, tl.sum(sum1, axis=0), mask=column < _if_less(first + 1, rank, columns))
    tl.store(at + 2 * columns, tl.sum(sum2, axis=0), mask=column < _if_less(first + 2, rank, columns))
    tl.store(at + 3 * columns, tl.sum(sum3, axis=0), mask=column < _if_less(first + 3, rank, columns))


@triton.jit
def _product(
    p,
    q,
    out,
    rows,
    quarter,
    columns,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUARTERS: tl.constexpr,
):
    if QUARTERS:
        columns = quarter * 4
    blocks = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there, inside = row < rows, column < columns
    values = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.static_range(RANK):
        left = tl.load(p + row * RANK + i, mask=there, other=0.0)
        right = tl.load(q + i * columns + column, mask=inside, other=0.0)
        values += left[:, None] * right[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
