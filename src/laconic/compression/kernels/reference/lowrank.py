"""Products with thin matrices, and bases of them, in plain torch; faster kernels must agree with them."""

from __future__ import annotations

import torch

SHIFT = 2.0**-49
"""A few rounding errors of float64: they keep a Gram matrix of dependent columns positive definite."""


def times_right(matrix: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """M Q, where `q` is Q^T: rows x rank."""
    torch.mm(matrix, q.t(), out=out)


def times_left(matrix: torch.Tensor, p: torch.Tensor, out: torch.Tensor) -> None:
    """P^T M: rank x columns."""
    torch.mm(p.t(), matrix, out=out)


def product(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """P Q^T, where `q` is Q^T: rows x columns, rounded to the type of `out`."""
    if out.dtype == p.dtype:
        torch.mm(p, q, out=out)
    else:
        out.copy_(p @ q)


def orthonormal(columns: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis that spans the columns of each matrix of a batch, with a full number of vectors.

        X = columns / |columns| + eps noise;   twice:  L L^T = X^T X + shift,  X = X L^-T

    The noise, no larger than the rounding of `columns`, replaces directions that dependent columns lack; without it a
    direction that is lost once (a zero gradient) would be lost for ever. In float64 the Gram matrix of float32 columns
    has digits to spare, and differences in rounding between machines are gone when the result is float32 again, so
    replicas agree. It takes a few operations on all matrices at once; QR on a GPU takes one matrix after the other.

    Reference: Fukaya et al. 2020, arXiv:1809.11085 (shifted Cholesky QR).
    """
    wide = columns.double()
    size = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    wide = wide / torch.where(size > 0, size, 1.0) + torch.finfo(columns.dtype).eps / noise.numel() ** 0.5 * noise
    if columns.dtype == torch.float64:
        # No digits to spare: by reflections, however long they take.
        return torch.linalg.qr(wide).Q
    unit = torch.eye(columns.shape[-1], dtype=torch.float64, device=columns.device)
    for _ in range(2):
        gram = wide.mT @ wide
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        diagonal += SHIFT * diagonal.sum(-1, keepdim=True)
        factor, _ = torch.linalg.cholesky_ex(gram)
        wide = wide @ torch.linalg.solve_triangular(factor, unit, upper=False).mT
    return wide.to(columns.dtype)
