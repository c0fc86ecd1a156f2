"""Send entries chosen at random, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.draw import Draw, draw_of
from laconic.compression.wire.entries import num_kept
from laconic.core.exchange import Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import flag, share


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Send k random entries of each tensor, the same ones on every rank, so that only values are sent and add up.

        k = ceil(density * numel),   m = mask of k places drawn from (step, parameter),   decoded = m * g

    Each tensor is cut into k nearly equal pieces, at cuts that move from step to step, and one entry of each piece is
    drawn: positions are distinct, all are equally likely, and nothing has to be sorted. Values are sent in the
    precision of the gradient.

    Reference: Stich et al. 2018, arXiv:1809.07599.
    """

    name: ClassVar[str] = "randomk"
    family: ClassVar[str] = "sparsification"
    good_for: ClassVar[str] = "the cheapest selection; many workers"

    density: float = share(0.01)
    """Share of the entries of each tensor that is sent; at least one of each."""
    scale: bool = flag(False)
    """Multiply the values by numel / k, which makes them unbiased; refused under error_feedback, which
    would take the factor for an error and send it back."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """With `scale` it is unbiased and needs no residual; without, unsent entries are lost."""
        return replace(
            super().traits,
            unbiased=self.scale,
            density=self.density,
            at_random=True,
            sends_every_value=False,
            amplifies=self.scale,
            linear=not self.scale,
            wants_error_feedback=not self.scale,
            loss_gap=0.326,
            loss_deviation=0.061,
        )

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The values at the positions of this step."""
        draw = self._draw(state)
        values = flat[draw.indices(state.moment)]
        return Payload((values * draw.factors.to(flat.dtype) if self.scale else values,))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Zeros, and the values at their positions."""
        out.zero_()
        out[self._draw(state).indices(state.moment)] = payload.tensors[0]

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One sum of k values of each tensor."""
        num_values = sum(num_kept(self.density, tensor.numel) for tensor in bucket.tensors)
        return (Round("sum", (num_values * bucket.dtype.itemsize,)),)

    def _draw(self, state: BucketState) -> Draw:
        return draw_of(state, self.density)
