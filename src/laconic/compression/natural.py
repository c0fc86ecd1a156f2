"""Send each value as a power of two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.families.quantizer import Quantizer
from laconic.compression.traits import Traits, computed_once
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class Natural(Quantizer):
    """Round |g| at random to the power of two below or above, and send sign and exponent in 8 bits.

        p = 2^floor(log2 |g|),   decoded = sign(g) * (2 p with probability (|g| - p) / p, else p)

    Exponents are counted down from the block's largest: 127 of them. Below the lowest of these, |g| becomes the lowest
    with probability |g| / lowest and zero otherwise, which is unbiased too. Powers below 2^-126 or above 2^127 are not
    used: only values beyond that range are always rounded down.

    Reference: Horvath et al. 2019, arXiv:1905.10988.
    """

    name: ClassVar[str] = "natural"
    good_for: ClassVar[str] = "magnitudes that differ by many powers of two"
    encoder: ClassVar[str] = "natural"
    decoder: ClassVar[str] = "natural"

    block: int = count(1024, at_least=32, at_most=65536)
    """Values whose exponents have the same base; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Rounding at random is unbiased."""
        return replace(super().traits, unbiased=True, loss_gap=-0.021, loss_deviation=0.025)

    @property
    def bits(self) -> int:
        """Eight."""
        return 8
