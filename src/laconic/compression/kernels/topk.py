"""The k largest magnitudes; every kernel gives the same indices."""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels


def topk_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending indices of the k largest magnitudes of `values` (one dimension); of equal magnitudes, the first.

    Values that are not finite count as largest, NaN above infinity.
    """
    return load_kernels("topk", values.device.type).topk_indices(values, k)


def topk_of_rows(values: torch.Tensor, k: int) -> torch.Tensor:
    """For every row of `values`, the ascending indices of its k largest magnitudes; of equal ones, the first."""
    return load_kernels("topk", values.device.type).topk_of_rows(values, k)
