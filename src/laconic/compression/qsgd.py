"""Send each value as a random multiple of its block's norm, without bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.families.quantizer import Levels
from laconic.compression.traits import Traits, computed_once
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class Qsgd(Levels):
    """Round |g| / L2(g) at random to one of `levels` steps and send it with its sign.

        decoded = L2(g) * sign(g) * l / levels,   l = floor(a) + (1 with probability a - floor(a)),
        a = levels * |g| / L2(g),   L2 over a block

    A block whose norm exceeds the largest float32 arrives as NaN. The noise is at most sqrt(block) / (2 levels) times
    the signal; where that may be above 1, error_feedback is refused: its residual would grow without bound.

    Reference: Alistarh et al. 2017, arXiv:1610.02132.
    """

    name: ClassVar[str] = "qsgd"
    good_for: ClassVar[str] = "4 bits without bias and without a residual to keep"
    encoder: ClassVar[str] = "qsgd"

    levels: int = count(
        7, at_least=1, at_most=127, advice="2 * levels + 1 codes must fit into 8 bits; for finer steps use fp16."
    )
    """Steps between zero and the norm; a code has as many bits as 2 * levels + 1 values need."""
    block: int = count(128, at_least=32, at_most=65536)
    """Values that share a norm; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """`amplifies` is set where the noise may exceed the signal."""
        return replace(
            super().traits,
            unbiased=True,
            amplifies=4 * self.levels**2 < self.block,
            loss_gap=-0.037,
            loss_deviation=0.02,
        )

    @property
    def largest_level(self) -> int:
        """As many as there are levels."""
        return self.levels

    def encoder_settings(self) -> dict[str, float]:
        """The number of levels."""
        return {"levels": self.levels}
