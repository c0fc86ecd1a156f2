"""Values as whole numbers on a grid that all ranks share, so that sums of numbers stand for sums of values.

    number = floor((value + shift) * (1 / unit) + u),   low <= number <= low + levels,   code = number - low
    value of a sum of n codes = (sum + n low) * unit - n shift

Each chunk of a bucket has a unit and a shift of its own; u is uniform in [0, 1). All arithmetic is in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from laconic.compression.kernels.loader import load_kernels
from laconic.compression.wire.cuts import Cuts


class Grid(NamedTuple):
    """The grid of each chunk: low ... low + levels, times its unit, minus its shift."""

    units: torch.Tensor
    """A float32 for each chunk; NaN: its values are unknown, and its sums are NaN."""
    shifts: torch.Tensor
    """A float32 for each chunk."""
    low: int
    """The smallest number."""
    levels: int
    """The largest number minus the smallest."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of codes."""
        return torch.uint8 if self.levels < 256 else torch.int32


def encode(
    flat: torch.Tensor, chunks: Cuts, grid: Grid, moment_seed: int, codes: torch.Tensor, *, reference: bool = False
) -> torch.Tensor:
    """Fill `codes`, of `grid.dtype`; returns for each chunk whether all of its values are finite."""
    finite = torch.ones(chunks.num_chunks, dtype=torch.bool, device=flat.device)
    if flat.numel():
        kernels = load_kernels("shared_grid", flat.device.type, reference=reference)
        kernels.encode(flat, chunks, grid, moment_seed, codes=codes, finite=finite)
    return finite


def decode(
    sums: torch.Tensor, count: int, chunks: Cuts, grid: Grid, out: torch.Tensor, *, reference: bool = False
) -> torch.Tensor:
    """Fill `out` with the values of sums of so many codes.

    Returns for each chunk the sum of squares of (sum + n low), in int64: exact, so that all ranks and devices agree.
    """
    squares = torch.zeros(chunks.num_chunks, dtype=torch.int64, device=out.device)
    if out.numel():
        kernels = load_kernels("shared_grid", out.device.type, reference=reference)
        kernels.decode(sums, count, chunks, grid, out=out, squares=squares)
    return squares
