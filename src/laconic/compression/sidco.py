"""Send the largest entries as a fitted distribution tells them, without a sort."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.compression.kernels.topk import topk_indices
from laconic.compression.wire.seeds import base_seed, mix, moment_seed
from laconic.compression.wire.sparse import Sparse
from laconic.core.stateful import BucketState

_STAGE_SHARE = 0.25
_SMALL = 1024
"""Entries; of a tensor with fewer the largest are found exactly: a fit to so few says little."""


@dataclass(frozen=True, kw_only=True)
class Sidco(Sparse):
    """Send about the k largest magnitudes of each tensor: those above a threshold from fitted exponentials.

        t_0 = 0,   t_i = t_(i-1) + mean(|g| - t_(i-1) where |g| > t_(i-1)) * log(1 / share_i)

    Each stage keeps a quarter of what passed the one before, the last what is left to k = ceil(density * numel).
    Exactly k are sent: of too many, k in a row from a random one on; too few are filled up from those that passed the
    stage before. A tensor with a value that is not finite is selected from exactly.

    Reference: M. Abdelmoniem et al. 2021, arXiv:2101.10761.
    """

    name: ClassVar[str] = "sidco"

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """About the largest magnitudes of each tensor."""
        now = moment_seed(state.moment)
        indices = torch.cat(
            [
                _about_largest(flat[place], self.num_entries(tensor.numel), mix(base_seed(tensor.name, 0) ^ now))
                + place.start
                for tensor, place in state.bucket.segments()
            ]
        )
        return indices, flat[indices]


def _about_largest(values: torch.Tensor, k: int, seed: int) -> torch.Tensor:
    if values.numel() < _SMALL or k == values.numel():
        return topk_indices(values, k)
    left = values.abs().to(torch.promote_types(values.dtype, torch.float32))
    stages: list[torch.Tensor] = []  # where those are that passed each
    threshold, share = 0.0, 0.0
    # On a GPU the host waits in each stage for what it found: four times less to look at in the next.
    while left.numel() > k and share <= _STAGE_SHARE:
        share = max(_STAGE_SHARE, k / left.numel())
        mean = left.mean().item()
        if not math.isfinite(mean):
            return topk_indices(values, k)
        threshold += (mean - threshold) * math.log(1 / share)
        kept = (left > threshold).nonzero().view(-1)
        stages.append(stages[-1][kept] if stages else kept)
        left = left[kept]
    passed = stages.pop()
    if passed.numel() >= k:
        return _in_a_row(passed, k, seed)
    is_free = torch.ones(values.numel(), dtype=torch.bool, device=values.device)
    is_free[passed] = False
    free = stages[-1][is_free[stages[-1]]] if stages else is_free.nonzero().view(-1)
    return torch.cat((passed, _in_a_row(free, k - passed.numel(), seed))).sort().values


def _in_a_row(places: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """`count` of them in ascending order: neighbours from the one the seed names, the first after the last."""
    rest = count - (places.numel() - (begin := seed % places.numel()))
    return torch.cat((places[: max(rest, 0)], places[begin : begin + count]))
