"""Products with thin matrices, and bases of them; kernels differ from each other by no more than rounding."""

from __future__ import annotations

from types import ModuleType

import torch

from laconic.compression.kernels.loader import load_kernels


def times_right(matrix: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Write M Q into `out`, where `q` is Q^T: rows x rank."""
    _kernel(out).times_right(matrix, q, out)


def times_left(matrix: torch.Tensor, p: torch.Tensor, out: torch.Tensor) -> None:
    """Write P^T M into `out`: rank x columns."""
    _kernel(out).times_left(matrix, p, out)


def product(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Write P Q^T into `out`, where `q` is Q^T: rows x columns, rounded to the type of `out`."""
    _kernel(out).product(p, q, out)


def orthonormal(columns: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis that spans the columns of each matrix of a batch; see `reference.lowrank`."""
    return _kernel(columns).orthonormal(columns, noise)


def _kernel(tensor: torch.Tensor) -> ModuleType:
    return load_kernels("lowrank", tensor.device.type)
