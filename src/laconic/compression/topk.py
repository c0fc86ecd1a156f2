"""Send the largest entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.traits import Traits
from laconic.core.stateful import BucketState


@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Keep the k largest magnitudes of each tensor and send their places and values.

        k = ceil(density * numel),   m = mask of the k largest |g|,   decoded = m * g

    Of equal magnitudes the first are taken; what is not finite counts as largest.

    Reference: Aji & Heafield 2017, arXiv:1704.05021.
    """

    name: ClassVar[str] = "topk"

    @property
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=0.188)

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest magnitudes of each tensor."""
        indices = self.entries(state.bucket).largest(flat)
        return indices, flat[indices]
