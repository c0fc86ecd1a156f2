"""Send the largest coefficients of a cosine transform."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.cosine import cosine_transform
from laconic.compression.wire.entries import Entries, entries_of_chunks, largest_of_chunks, num_kept_of_chunks
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import count, share


@dataclass(frozen=True, kw_only=True)
class DctTopK(Sparsifier):
    """Transform each chunk of a tensor by a cosine transform and send its k largest coefficients.

        c = D x,   D[i, j] = sqrt((1 or 2) / chunk) cos(pi (2 j + 1) i / (2 chunk)),   1 for i = 0, else 2
        k = ceil(density * chunk),   m = mask of the k largest |c|,   decoded = D^T (m * c)

    D is orthonormal, so only unsent coefficients are lost. The last chunk of a tensor may be shorter. A value that is
    not finite makes its whole chunk not finite.

    Reference: Peng et al. 2024 (DeMo), arXiv:2411.19870.
    """

    name: ClassVar[str] = "dct_topk"
    good_for: ClassVar[str] = "gradients whose adjacent entries change together"

    density: float = share(0.05)
    """Share of the coefficients of each chunk that is sent; at least one of each."""
    chunk: int = count(64, at_least=1, at_most=4096)
    """Adjacent entries that are transformed together."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=0.119, loss_deviation=0.044)

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest coefficients of each chunk."""
        coefficients = cosine_transform(flat, state, self.chunk)
        chosen = largest_of_chunks(coefficients, state.bucket, self.chunk, self.density)
        return chosen, coefficients[chosen]

    def num_entries(self, numel: int) -> int:
        """The number of entries of all chunks."""
        return num_kept_of_chunks(self.density, numel, self.chunk)

    def entries(self, bucket: Bucket) -> Entries:
        """The same number of entries of each chunk, whose positions often take fewer bytes."""
        return entries_of_chunks(super().entries(bucket), self.chunk, self.density)

    def dense(self, values: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Transform back."""
        return cosine_transform(values, state, self.chunk, inverse=True)
