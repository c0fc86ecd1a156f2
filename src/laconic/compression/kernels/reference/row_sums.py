"""The sum of rows of floating-point numbers, by plain torch."""

from __future__ import annotations

import torch


def sum_of_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the sum of all rows, in their order; without copies, where rounding to its dtype is exact."""
    out.copy_(rows[0])
    exact = torch.promote_types(rows.dtype, out.dtype) == out.dtype
    for row in rows[1:]:
        out += row if exact else row.to(out.dtype)
