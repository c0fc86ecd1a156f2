"""Blocks rotated by a randomized Hadamard transform.

    forward(x) = H D x,   backward(y) = D H y,   H[i, j] = (-1)^(number of ones in i & j) / sqrt(size),   D random signs

The transform uses only sums and differences, in the same order everywhere, so its bits do not depend on the device or
the number of blocks. Only sums of squares may differ in their last bits.

Reference: Ailon & Chazelle 2009 (fast Johnson-Lindenstrauss transform).
"""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels
from laconic.compression.wire.rotation import Rotation


def sums_of_squares(flat: torch.Tensor, rotation: Rotation, *, reference: bool = False) -> torch.Tensor:
    """The sum of squares of each block, in float64; a rotation keeps it."""
    squares = torch.empty(rotation.num_chunks, dtype=torch.float64, device=flat.device)
    if flat.numel():
        load_kernels("rotation", flat.device.type, reference=reference).sums_of_squares(flat, rotation, squares)
    return squares


def forward(flat: torch.Tensor, rotation: Rotation, seed: int, *, reference: bool = False) -> torch.Tensor:
    """Every block rotated, in float32."""
    rotated = torch.empty(flat.numel(), dtype=torch.float32, device=flat.device)
    if flat.numel():
        load_kernels("rotation", flat.device.type, reference=reference).forward(flat, rotation, seed, rotated)
    return rotated


def backward(
    values: torch.Tensor, rotation: Rotation, seed: int, out: torch.Tensor, *, reference: bool = False
) -> None:
    """Fill `out` with every block rotated back, by arithmetic in float32."""
    if values.numel():
        load_kernels("rotation", values.device.type, reference=reference).backward(values, rotation, seed, out)
