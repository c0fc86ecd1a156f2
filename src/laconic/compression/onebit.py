"""Send signs, and for each block the mean of its positive and of its negative values; made for error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.families.quantizer import Quantizer
from laconic.compression.traits import Traits, computed_once
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class OneBit(Quantizer):
    """Send the sign of every value and, per block, the means of positive and of negative values.

        decoded = mean of the g >= 0 where g >= 0,   mean of the g < 0 where g < 0

    The residual of 1-bit SGD comes from the wrapper: "onebit + error_feedback".

    Reference: Seide et al. 2014, "1-bit stochastic gradient descent" (Interspeech).
    """

    name: ClassVar[str] = "onebit"
    good_for: ClassVar[str] = "one bit where gradients lean to one side"
    encoder: ClassVar[str] = "onebit"
    decoder: ClassVar[str] = "onebit"
    num_scales: ClassVar[int] = 2

    block: int = count(1024, at_least=32, at_most=65536)
    """Values that share the two means; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """One bit per value loses most of it."""
        return replace(super().traits, wants_error_feedback=True, loss_gap=0.164, loss_deviation=0.022)

    @property
    def bits(self) -> int:
        """One."""
        return 1
