"""The sum of rows of floating-point numbers."""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels


def sum_of_rows(rows: torch.Tensor, out: torch.Tensor, *, reference: bool = False) -> None:
    """Fill `out` with the sum of all of `rows`, each rounded to the dtype of `out`, added up in their order."""
    if rows.numel():
        load_kernels("row_sums", out.device.type, reference=reference).sum_of_rows(rows, out)
