"""Send the largest entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.entries import Entries, entries_of_chunks, largest_of_chunks, num_kept_of_chunks
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Keep the k largest magnitudes of each tensor, or of each chunk of it, and send their positions and values.

        k = ceil(density * numel),   m = mask of the k largest |g|,   decoded = m * g

    Of equal magnitudes the first are taken; values that are not finite count as largest. With `chunk`, numel is that of
    a chunk: positions take fewer bits, and no part of a tensor is left out for long.

    Reference: Aji & Heafield 2017, arXiv:1704.05021; Sarfi et al. 2025 (in chunks), arXiv:2508.15706.
    """

    name: ClassVar[str] = "topk"
    good_for: ClassVar[str] = "few workers on slow links"

    chunk: int = count(0, at_most=4096)
    """Adjacent entries of which the largest are taken; 0: the whole tensor."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """`loss_gap` was measured with default settings."""
        return replace(super().traits, loss_gap=0.158, loss_deviation=0.036)

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest magnitudes of each tensor, or of each chunk."""
        if self.chunk:
            indices = largest_of_chunks(flat, state.bucket, self.chunk, self.density)
        else:
            indices = self.entries(state.bucket).largest(flat)
        return indices, flat[indices]

    def num_entries(self, numel: int) -> int:
        """The number of entries of the tensor, or of its chunks."""
        return num_kept_of_chunks(self.density, numel, self.chunk) if self.chunk else super().num_entries(numel)

    def entries(self, bucket: Bucket) -> Entries:
        """The same number of entries of each chunk, whose positions often take fewer bytes."""
        plain = super().entries(bucket)
        return entries_of_chunks(plain, self.chunk, self.density) if self.chunk else plain
