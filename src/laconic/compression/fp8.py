"""Send gradients in an 8-bit floating-point format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.families.quantizer import Quantizer
from laconic.compression.traits import Traits, computed_once
from laconic.settings import choice


@dataclass(frozen=True, kw_only=True)
class Fp8(Quantizer):
    """Round every value to e4m3 (4 bits of exponent, 3 of mantissa) after scaling its block into the range of e4m3.

        unit = max |g| / 448 over a block,   decoded = unit * e4m3(g / unit)

    Relative errors stay below 1/16 down to 2^-14 of the block's largest value, where int8 already rounds to zero.

    Reference: Micikevicius et al. 2022, arXiv:2209.05433.
    """

    name: ClassVar[str] = "fp8"
    good_for: ClassVar[str] = "a quarter of the bytes where magnitudes within a block differ widely"
    encoder: ClassVar[str] = "fp8"
    decoder: ClassVar[str] = "fp8"

    rounding: str = choice("nearest", "stochastic")
    """nearest: the smallest error. stochastic: up or down at random, so that errors cancel out on average."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Rounding at random is unbiased."""
        return replace(super().traits, unbiased=self.rounding == "stochastic", loss_gap=-0.001, loss_deviation=0.004)

    @property
    def bits(self) -> int:
        """Eight."""
        return 8

    def encoder_settings(self) -> dict[str, float]:
        """The rounding."""
        return {"stochastic": self.rounding == "stochastic"}
