"""About the k largest magnitudes on a CPU: one pass collects what passes a threshold.

Imported only where numba is installed.
"""

from __future__ import annotations

import numpy as np
import torch

from laconic.compression.kernels import sidco_reference
from laconic.compression.kernels.sidco_reference import SAMPLE
from laconic.compression.kernels.topk_numba import LARGEST_KEY, collect

_INFINITY = 0x7F800000


def about_largest(values: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    """See `sidco_reference.about_largest`."""
    n = values.numel()
    if values.dtype != torch.float32 or not sidco_reference.is_estimated(n, k):
        return sidco_reference.about_largest(values, k, seed)
    values = values.detach().contiguous()
    sample = values[sidco_reference.sample_places(n, values.device)].abs().double()
    fill, threshold = sidco_reference.thresholds(sample, k * SAMPLE / n)
    bits = values.view(torch.int32).numpy()
    places = np.empty(min(n, 16 * k), np.int64)
    # The next larger number; no room for them all is rare, and so is a value that is not finite.
    count = collect(bits, LARGEST_KEY, np.float32(fill).view(np.int32) + np.int32(1), places)
    keys = bits[places[: max(count, 0)]] & LARGEST_KEY
    if count < k or keys.max() >= _INFINITY:
        return sidco_reference.about_largest(values, k, seed)
    passes = keys > np.float32(threshold).view(np.int32)
    return sidco_reference.chosen(torch.from_numpy(places[:count]), torch.from_numpy(passes), k, seed)
