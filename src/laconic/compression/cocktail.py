"""Send the largest of randomly drawn entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.draw import draw_of
from laconic.compression.wire.entries import Entries, num_kept
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.errors import InvalidSetting
from laconic.settings import share


@dataclass(frozen=True, kw_only=True)
class Cocktail(Sparsifier):
    """Draw a share of each tensor's entries at random, the same on every rank, and send the largest of these.

        D = ceil(sample * numel) places drawn from (step, parameter),   k = ceil(density * numel)
        m = mask of the k largest |g| among D,   decoded = m * g

    Positions are sent as numbers among the drawn entries, which takes fewer bits, and only drawn entries are sorted.
    All entries are drawn in turn, as with randomk, and the largest of those drawn are sent, as with topk. The published
    method also codes values in 4 bits and keeps a residual: "cocktail + chain(second=int4) + error_feedback".

    Reference: Wang et al. 2023 (CocktailSGD), ICML 2023, PMLR 202:36058-36076.
    """

    name: ClassVar[str] = "cocktail"
    good_for: ClassVar[str] = "very slow links, with 4-bit values and error feedback"

    density: float = share(0.02)
    """Share of the entries of each tensor that is sent; at least one of each."""
    sample: float = share(0.1)
    """Share of the entries of each tensor that is drawn, from which the largest are sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample <= self.density:
            raise InvalidSetting(
                f"compression.cocktail.sample={self.sample} draws no more entries than density={self.density} sends, "
                "so there is nothing to choose from. Draw more, or use randomk."
            )

    @property
    @computed_once
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, at_random=True, loss_gap=0.211, loss_deviation=0.077)

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest magnitudes among the drawn entries of each tensor, numbered as drawn."""
        drawn = flat[draw_of(state, self.sample).indices(state.moment)]
        numbers = self.entries(state.bucket).largest(drawn)
        return numbers, drawn[numbers]

    def num_entries(self, numel: int) -> int:
        """At most the number of drawn entries."""
        return min(num_kept(self.density, numel), num_kept(self.sample, numel))

    def entries(self, bucket: Bucket) -> Entries:
        """The entries among the drawn ones."""
        drawn = Bucket(
            tuple(replace(tensor, shape=(num_kept(self.sample, tensor.numel),)) for tensor in bucket.tensors)
        )
        return Entries(drawn, super().entries(bucket).counts, self.indices)

    def dense(self, values: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Each drawn entry in its place."""
        whole = values.new_zeros(state.bucket.numel)
        whole[draw_of(state, self.sample).indices(state.moment)] = values
        return whole
