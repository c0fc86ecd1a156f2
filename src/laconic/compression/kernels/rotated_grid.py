"""Rotated blocks as whole numbers on a grid that all ranks share: kernels/rotation.py, then kernels/shared_grid.py."""

from __future__ import annotations

from types import ModuleType

import torch

from laconic.compression.kernels import shared_grid
from laconic.compression.kernels.loader import load_faster
from laconic.compression.kernels.rotation import backward, forward
from laconic.compression.kernels.shared_grid import Grid
from laconic.compression.wire.rotation import Rotation


def encode(
    flat: torch.Tensor,
    rotation: Rotation,
    seed: int,
    grid: Grid,
    moment_seed: int,
    *,
    codes: torch.Tensor,
    reference: bool = False,
) -> None:
    """Rotate `flat`, and fill `codes`, of `grid.dtype`."""
    fused = _fused(rotation, flat, reference=reference)
    if fused is not None:
        fused.encode(flat, rotation, seed, grid, moment_seed, codes=codes)
        return
    rotated = forward(flat, rotation, seed, reference=reference)
    shared_grid.encode(rotated, rotation, grid, moment_seed, codes, reference=reference)


def decode(
    sums: torch.Tensor,
    count: int,
    rotation: Rotation,
    seed: int,
    grid: Grid,
    *,
    out: torch.Tensor,
    reference: bool = False,
) -> None:
    """Fill `out` with the values, rotated back, of sums of so many codes."""
    fused = _fused(rotation, out, reference=reference)
    if fused is not None:
        fused.decode(sums, count, rotation, seed, grid, out=out)
        return
    rotated = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
    shared_grid.decode(sums, count, rotation, grid, rotated, reference=reference)
    backward(rotated, rotation, seed, out, reference=reference)


def _fused(rotation: Rotation, tensor: torch.Tensor, *, reference: bool) -> ModuleType | None:
    fused = None if reference or not tensor.numel() else load_faster("rotated_grid", tensor.device.type)
    return fused if fused is not None and fused.takes(rotation) else None
