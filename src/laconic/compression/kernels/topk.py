"""The k largest magnitudes; every kernel gives the same indices."""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels


def topk_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest magnitudes of `values` (one dimension) are, in ascending order; of equals the first.

    What is not finite counts as largest, NaN above all.
    """
    return load_kernels("topk", values.device.type).topk_indices(values, k)


def topk_of_rows(values: torch.Tensor, k: int) -> torch.Tensor:
    """For every row of `values`, where its k largest magnitudes are, in ascending order; of equals the first."""
    return load_kernels("topk", values.device.type).topk_of_rows(values, k)
