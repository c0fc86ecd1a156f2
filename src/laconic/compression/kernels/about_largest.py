"""About the k largest magnitudes by sidco's thresholds, found by the fastest kernel there is for a device."""

from __future__ import annotations

import torch

from laconic.compression.kernels import sidco_reference
from laconic.compression.kernels.compiled import compiled

_FASTER = {"cpu": "sidco_numba", "cuda": "topk_triton"}
"""device type -> the module for it"""


def about_largest(values: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    """Where exactly k of about the largest magnitudes of `values` are, in ascending order; 0 <= seed < 2^31."""
    name = _FASTER.get(values.device.type)
    return ((compiled(name) if name else None) or sidco_reference).about_largest(values, k, seed)
