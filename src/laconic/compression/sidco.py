"""Send about the largest entries, by a threshold from a fitted distribution, without a sort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.kernels.approximate_topk import approximate_topk
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.seeds import base_seed, mix, moment_seed
from laconic.core.stateful import BucketState


@dataclass(frozen=True, kw_only=True)
class Sidco(Sparsifier):
    """Send about the k largest magnitudes of each tensor: those above a threshold from fitted exponentials.

        t_0 = 0,   t_i = t_(i-1) + mean(|g| - t_(i-1) where |g| > t_(i-1)) * log(1 / share_i)

    Each stage keeps a quarter of the entries that passed the previous one, and the last stage keeps k = ceil(density *
    numel); the means are those of a sample of 16384 magnitudes. Exactly k entries are sent: if too many pass, k
    consecutive ones from a random start; if too few, entries that passed an earlier stage are added. The largest
    entries are found exactly for a tensor that is smaller than the sample, has a value that is not finite, or of which
    too few entries passed.

    Reference: M. Abdelmoniem et al. 2021, arXiv:2101.10761.
    """

    name: ClassVar[str] = "sidco"
    good_for: ClassVar[str] = "about topk on a GPU, without a sort"

    @property
    @computed_once
    def traits(self) -> Traits:
        """`loss_gap` was measured with default settings."""
        return replace(super().traits, loss_gap=0.156, loss_deviation=0.035)

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """About the largest magnitudes of each tensor."""
        now = moment_seed(state.moment)
        indices = torch.cat(
            [
                approximate_topk(flat[place], self.num_entries(tensor.numel), mix(base_seed(tensor.name, 0) ^ now) >> 1)
                + place.start
                for tensor, place in state.bucket.segments()
            ]
        )
        return indices, flat[indices]
