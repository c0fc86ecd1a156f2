"""The k largest magnitudes, found by the fastest kernel there is for a device; all give the same indices."""

from __future__ import annotations

from types import ModuleType

import torch

from laconic.compression.kernels import topk_reference
from laconic.compression.kernels.compiled import compiled

_FASTER = {"cpu": "topk_numba", "cuda": "topk_triton"}
"""device type -> the module for it"""


def topk_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest magnitudes of `values` (one dimension) are, in ascending order; of equals the first.

    What is not finite counts as largest, NaN above all.
    """
    return _kernel(values.device.type).topk_indices(values, k)


def topk_of_rows(values: torch.Tensor, k: int) -> torch.Tensor:
    """For every row of `values`, where its k largest magnitudes are, in ascending order; of equals the first."""
    return _kernel(values.device.type).topk_of_rows(values, k)


def _kernel(device_type: str) -> ModuleType:
    name = _FASTER.get(device_type)
    return (compiled(name) if name else None) or topk_reference
