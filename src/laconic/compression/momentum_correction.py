"""Momentum on the workers, before compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor, Wrapper
from laconic.compression.traits import Traits
from laconic.core.exchange import Exchange, Group
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.settings import number

_VELOCITY = "momentum_correction.velocity"


@dataclass(frozen=True, kw_only=True)
class MomentumCorrection(Wrapper):
    """Compress each worker's velocity instead of its gradient.

        u = m u + g,   send C(u)

    With error feedback inside ("topk + error_feedback + momentum_correction"), unsent values are sent later as part of
    a velocity, as if there had been no compression; momentum in the optimizer would instead count a value from the step
    in which it arrives. Error feedback outside is refused: it would take m u, which is not lost, for a loss. The
    optimizer must have no momentum of its own. A value that is not finite is sent, and not kept in the velocity.

    Reference: Lin et al. 2018 (momentum correction in DGC), arXiv:1712.01887.
    """

    name: ClassVar[str] = "momentum_correction"
    good_for: ClassVar[str] = "sparsifiers, with an optimizer that has no momentum"
    # Gradients are scaled by 1/n, so velocities add up to that of the mean gradient, whichever worker holds them.
    on_resize: ClassVar[Mapping[str, Resize]] = {_VELOCITY: "sum"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_VELOCITY})

    momentum: float = number(0.9, above=0.0, at_most=0.999)
    """The share of the last step's velocity that is kept."""

    def traits_around(self, inner: Traits) -> Traits:
        """The result is a velocity, not the gradient."""
        return replace(inner, accumulates=True, lossless=False, unbiased=False)

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if the optimizer has momentum as well."""
        optimizer.check_no_momentum("compression.momentum_correction", 'leave "+ momentum_correction" out')
        super().check(tensors, optimizer)

    def init(self, bucket: Bucket) -> BucketState:
        """A velocity of zero per element, and the inner state."""
        state = self.inner.init(bucket)
        state.flat[_VELOCITY] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        return state

    def back(self) -> Compressor:
        """The inner compressor's, without momentum, which is already in the values that were sent."""
        return self.inner.back()

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The inner compressor's payload for the velocity."""
        velocity = state.flat[_VELOCITY]
        moved = torch.add(flat, velocity, alpha=self.momentum)
        velocity.copy_(torch.where(moved.isfinite(), moved, velocity))
        return self.inner.encode(moved, state)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange the velocity."""
        velocity = state.flat[_VELOCITY]
        flat.add_(velocity, alpha=self.momentum)
        velocity.copy_(torch.where(flat.isfinite(), flat, velocity))
        yield from self.inner.exchange(flat, state, group, own)
