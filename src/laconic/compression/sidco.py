"""Send the largest entries as a fitted distribution tells them, without a sort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.kernels.approximate_topk import approximate_topk
from laconic.compression.traits import Traits
from laconic.compression.wire.seeds import base_seed, mix, moment_seed
from laconic.core.stateful import BucketState


@dataclass(frozen=True, kw_only=True)
class Sidco(Sparsifier):
    """Send about the k largest magnitudes of each tensor: those above a threshold from fitted exponentials.

        t_0 = 0,   t_i = t_(i-1) + mean(|g| - t_(i-1) where |g| > t_(i-1)) * log(1 / share_i)

    Each stage keeps a quarter of what passed the one before, the last what is left to k = ceil(density * numel); the
    means are those of a sample of 16384 magnitudes. Exactly k are sent: of too many, k in a row from a random one on;
    too few are filled up from those that passed an earlier stage. Of a tensor that is smaller than the sample, that has
    a value which is not finite, or of which too few passed, the largest are found exactly.

    Reference: M. Abdelmoniem et al. 2021, arXiv:2101.10761.
    """

    name: ClassVar[str] = "sidco"

    @property
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=0.173)

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
