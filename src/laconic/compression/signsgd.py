"""Vote on the sign of every value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.quantizer import Quantizer
from laconic.compression.traits import Traits, computed_once
from laconic.core.stateful import BucketState
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class SignSgd(Quantizer):
    """Replace the gradient by a majority vote on its sign: one bit per value in each direction.

        decoded = sign(sum_i sign(g_i)),   zero and a tie count as +1

    The result is the vote itself, +1 or -1, not a mean: plain SGD then moves every parameter by the learning rate, so
    it needs a learning rate like Adam's. Where gradients are mostly noise, two workers tie half the time: use an odd
    number. Both routes, gather and scatter, give the same vote. One bit cannot represent NaN, so each block carries one
    number that can.

    Reference: Bernstein et al. 2018, arXiv:1810.05291.
    """

    name: ClassVar[str] = "signsgd"
    good_for: ClassVar[str] = "one bit both ways with Adam-like step sizes"
    encoder: ClassVar[str] = "sign"
    decoder: ClassVar[str] = "sign"

    block: int = count(65536, at_least=32, at_most=65536)
    """Values that arrive as NaN together when one of them is not finite; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """A vote is +1 or -1, however large gradients are."""
        return replace(super().traits, keeps_scale=False, scale_equivariant=False, loss_gap=0.007, loss_deviation=0.039)

    @property
    def bits(self) -> int:
        """One."""
        return 1

    def _sum(self, rows: torch.Tensor, like: torch.Tensor, state: BucketState) -> torch.Tensor:
        """The vote of all ranks."""
        # In float32: 16-bit formats cannot count many voters.
        votes = super()._sum(rows, torch.empty(like.shape, dtype=torch.float32, device=like.device), state)
        return torch.where(votes.isnan(), votes, torch.where(votes >= 0, 1.0, -1.0))
