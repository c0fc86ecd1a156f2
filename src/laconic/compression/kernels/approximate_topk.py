"""About the k largest magnitudes, by the thresholds of sidco."""

from __future__ import annotations

import torch

from laconic.compression.kernels.loader import load_kernels


def approximate_topk(values: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    """K positions of about the largest magnitudes of `values`, in ascending order; 0 <= seed < 2^31."""
    return load_kernels("approximate_topk", values.device.type).approximate_topk(values, k, seed)
