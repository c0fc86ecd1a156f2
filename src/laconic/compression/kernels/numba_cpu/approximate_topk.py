"""About the k largest magnitudes on a CPU: one pass collects the values above a threshold.

Imported only where numba is installed.
"""

from __future__ import annotations

import numpy as np
import torch

from laconic.compression.kernels.numba_cpu.topk import LARGEST_KEY, collect
from laconic.compression.kernels.reference import approximate_topk as reference
from laconic.compression.kernels.reference.approximate_topk import SAMPLE

_INFINITY = 0x7F800000


def approximate_topk(values: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    n = values.numel()
    if values.dtype != torch.float32 or not reference.is_estimated(n, k):
        return reference.approximate_topk(values, k, seed)
    values = values.detach().contiguous()
    sample = values[reference.sample_places(n, values.device)].abs().double()
    fill, threshold = reference.thresholds(sample, k * SAMPLE / n)
    bits = values.view(torch.int32).numpy()
    places = np.empty(min(n, 16 * k), np.int64)
    # The next larger number; no room for them all is rare, and so is a value that is not finite.
    count = collect(bits, LARGEST_KEY, np.float32(fill).view(np.int32) + np.int32(1), places)
    keys = bits[places[: max(count, 0)]] & LARGEST_KEY
    if count < k or keys.max() >= _INFINITY:
        return reference.approximate_topk(values, k, seed)
    passes = keys > np.float32(threshold).view(np.int32)
    return reference.chosen(torch.from_numpy(places[:count]), torch.from_numpy(passes), k, seed)
