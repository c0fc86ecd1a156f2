"""Whole numbers on a shared grid, by plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from laconic.compression.wire.cuts import Cuts

if TYPE_CHECKING:
    from laconic.compression.kernels.shared_grid import Grid


def encode(
    flat: torch.Tensor, chunks: Cuts, grid: Grid, moment_seed: int, *, codes: torch.Tensor, finite: torch.Tensor
) -> None:
    """Fill `codes`, and mark chunks that are not finite."""
    chunk = chunks.chunk_of_element()
    scaled = (flat.float() + grid.shifts[chunk]) * grid.units.reciprocal()[chunk] + chunks.random(moment_seed)
    numbers = scaled.floor().nan_to_num(nan=0.0).clamp(grid.low, grid.low + grid.levels)
    codes.copy_(numbers - grid.low)
    finite[chunk[~flat.float().isfinite()]] = False


def decode(
    sums: torch.Tensor, count: int, chunks: Cuts, grid: Grid, *, out: torch.Tensor, squares: torch.Tensor
) -> None:
    """Fill `out` with values, and `squares` with sums of squares of whole numbers."""
    chunk = chunks.chunk_of_element()
    numbers = sums.long() + count * grid.low
    squares.index_add_(0, chunk, numbers.square())
    out.copy_(numbers.float() * grid.units[chunk] - count * grid.shifts[chunk])
