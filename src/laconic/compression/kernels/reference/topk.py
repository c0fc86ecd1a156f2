"""The k largest magnitudes in plain torch, on any device: the reference that faster kernels must agree with."""

from __future__ import annotations

import torch

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def magnitude_keys(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the order of the magnitudes: the bits of each value without its sign.

    Infinity comes after every finite value and NaN after infinity, so values that are not finite count as largest.
    """
    whole = _WHOLE_NUMBERS[values.dtype.itemsize]
    return values.contiguous().view(whole) & torch.iinfo(whole).max


def topk_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending indices of the k largest magnitudes of `values` (one dimension); of equal magnitudes, the first."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    keys = magnitude_keys(values)
    least = keys.topk(k, sorted=False).values.min()
    above, equal = keys > least, keys == least
    first = equal.cumsum(0) <= k - above.sum()
    # The size is known, so a GPU need not be asked for it.
    return (above | (equal & first)).nonzero_static(size=k).view(-1)


def topk_of_rows(values: torch.Tensor, k: int) -> torch.Tensor:
    """For every row of `values`, the ascending indices of its k largest magnitudes; of equal ones, the first."""
    keys = magnitude_keys(values)
    return keys.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
