"""Send each value as a power of two below its block's norm, without bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.families.quantizer import Quantizer
from laconic.compression.traits import Traits, computed_once
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class NuqSgd(Quantizer):
    """Round |g| / L2(g) at random to one of `levels` powers of two or to zero, and send it with its sign.

        a = |g| / L2(g),   decoded = L2(g) * sign(g) * l,   L2 over a block
        l = one of the two of 0, 2^(1 - levels), ..., 1/4, 1/2, 1 on both sides of a, so that l is a on average

    Most values of a block are far below its norm; there the levels of qsgd are far apart, and those of nuqsgd are close
    together. The square of the noise is at most 1/8 + block / 4^levels of that of the signal; where that may be above
    1, error_feedback is refused: its residual would grow without bound. A block whose norm exceeds the largest float32
    arrives as NaN.

    Reference: Ramezani-Kebrya et al. 2019, arXiv:1908.06077.
    """

    name: ClassVar[str] = "nuqsgd"
    good_for: ClassVar[str] = "4 bits without bias where most values are far below the norm"
    encoder: ClassVar[str] = "nuqsgd"
    decoder: ClassVar[str] = "nuqsgd"

    levels: int = count(7, at_least=1, at_most=127, advice="2 * levels + 1 codes must fit into 8 bits.")
    """Powers of two from the norm down; a code has as many bits as 2 * levels + 1 values need."""
    block: int = count(1024, at_least=32, at_most=65536)
    """Values that share a norm; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """`amplifies` is set where the noise may exceed the signal."""
        return replace(
            super().traits,
            unbiased=True,
            amplifies=8 * self.block > 7 * 4**self.levels,
            loss_gap=-0.024,
            loss_deviation=0.022,
        )

    @property
    def bits(self) -> int:
        """Two to eight."""
        return (2 * self.levels).bit_length()

    def encoder_settings(self) -> dict[str, float]:
        """The number of levels."""
        return {"levels": self.levels}

    def decoder_settings(self) -> dict[str, float]:
        """The number of levels."""
        return {"largest": self.levels}
