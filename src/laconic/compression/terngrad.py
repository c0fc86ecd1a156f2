"""Send each value as -1, 0 or 1 times its block's scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.families.quantizer import Levels
from laconic.compression.traits import Traits, computed_once
from laconic.settings import count, number


@dataclass(frozen=True, kw_only=True)
class TernGrad(Levels):
    """Clip each block at 2.5 sigma and send the largest magnitude times a random -1, 0 or 1.

        c = g clipped to [-clip * sigma, clip * sigma],   sigma = sqrt(mean g^2),   s = max |c|
        decoded = s * sign(g) * b,   P(b = 1) = |c| / s

    Clipping and s are per block, not per layer. sigma is taken about zero and not about the mean, so that a block of
    one value, or of equal values, is not clipped to nothing. Unbiased except for clipping.

    Reference: Wen et al. 2017, arXiv:1705.07878.
    """

    name: ClassVar[str] = "terngrad"
    good_for: ClassVar[str] = "2 bits without a residual to keep"
    encoder: ClassVar[str] = "terngrad"

    clip: float = number(2.5, at_least=1.0)
    """Where values are clipped, in sigmas of their block; a large number clips nothing."""
    block: int = count(1024, at_least=32, at_most=65536)
    """Values that are clipped and scaled together; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Biased by clipping. `amplifies` is set where the noise, up to clip - 1 times the signal, may exceed it."""
        return replace(super().traits, amplifies=self.clip > 2.0, loss_gap=-0.021, loss_deviation=0.038)

    @property
    def largest_level(self) -> int:
        """Codes reach from -1 to 1."""
        return 1

    def encoder_settings(self) -> dict[str, float]:
        """Where to clip."""
        return {"clip": self.clip}
