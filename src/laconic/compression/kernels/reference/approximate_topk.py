"""About the k largest magnitudes by a fitted threshold, in plain torch on any device.

    t_0 = 0,   t_i = t_(i-1) + mean(|g| - t_(i-1) where |g| > t_(i-1)) * log(1 / share_i)

The means are those of a sample, summed in float64, so that the order of summation hardly ever affects a threshold.
"""

from __future__ import annotations

import math

import torch

from laconic.compression.kernels.topk import topk_indices
from laconic.compression.wire.seeds import mix_tensor

SAMPLE = 1 << 14
"""Sampled values that exponentials are fitted to: chance then moves the number that passes by a few percent."""
RUN = 4
"""Adjacent values in each run of the sample: a GPU reads them at the cost of one."""
STAGE_SHARE = 0.25


def is_estimated(n: int, k: int) -> bool:
    """Whether the k largest of n values are estimated; of few values they are found exactly, as little can be saved."""
    return n >= SAMPLE and 0 < k < n


def approximate_topk(values: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    """Positions of about the k largest magnitudes of `values`, in ascending order; exactly k.

    If more than k values pass the last threshold, k consecutive ones are taken, from a start given by the seed. If
    fewer do, values that pass a lower threshold are added. If those are too few as well, or a value is not finite, the
    exact k largest are taken.
    """
    n = values.numel()
    if not is_estimated(n, k):
        return topk_indices(values, k)
    magnitudes = values.abs().to(torch.promote_types(values.dtype, torch.float32))
    if not bool(magnitudes.amax().isfinite()):
        return topk_indices(values, k)
    fill, threshold = thresholds(magnitudes[sample_places(n, values.device)].double(), k * SAMPLE / n)
    wide = (magnitudes > fill).nonzero().view(-1)
    if wide.numel() < k:
        return topk_indices(values, k)
    return chosen(wide, magnitudes[wide] > threshold, k, seed)


def thresholds(sample: torch.Tensor, wanted: float) -> tuple[float, float]:
    """The last threshold that clearly more than `wanted` of these magnitudes (float64) pass, and the last of all.

    Both can be represented in float32. "Clearly": so many more that chance hardly explains it.
    """
    clearly = wanted + 4 * math.sqrt(wanted) + 8
    fill = threshold = share = 0.0
    left = sample
    while left.numel() > wanted and share <= STAGE_SHARE:
        share = max(STAGE_SHARE, wanted / left.numel())
        step = (float(left.sum()) / left.numel() - threshold) * math.log(1 / share)
        threshold = float(torch.tensor(threshold + step, dtype=torch.float32))
        left = left[left > threshold]
        fill = threshold if left.numel() > clearly else fill
    return fill, threshold


def chosen(places: torch.Tensor, passes: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    """Take k of the positions; those that pass the threshold come first."""
    passed = places[passes]
    if passed.numel() >= k:
        return _in_a_row(passed, k, seed)
    return torch.cat((passed, _in_a_row(places[~passes], k - passed.numel(), seed))).sort().values


def sample_places(n: int, device: torch.device) -> torch.Tensor:
    """Runs of adjacent positions, evenly spread except for shifts that no regular pattern in the values can follow."""
    i = torch.arange(SAMPLE, device=device)
    run, runs = i // RUN, SAMPLE // RUN
    return run * n // runs + (mix_tensor(run) >> 8) % (n // runs - RUN + 1) + i % RUN


def _in_a_row(places: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """`count` consecutive positions, cyclically, from a start given by the seed; in ascending order."""
    rest = count - (places.numel() - (begin := seed % places.numel()))
    return torch.cat((places[: max(rest, 0)], places[begin : begin + count]))
