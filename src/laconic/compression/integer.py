"""Send gradients as whole numbers of 8 or 4 bits: int8 and int4 share this implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.families.quantizer import Levels
from laconic.compression.traits import Traits, computed_once
from laconic.settings import choice


@dataclass(frozen=True, kw_only=True)
class Integer(Levels):
    """Round every value to a whole multiple of the unit of its block."""

    encoder: ClassVar[str] = "integer"
    largest: ClassVar[int]

    rounding: str = choice("nearest", "stochastic")
    """nearest: the smallest error. stochastic: up or down at random, so that errors cancel out on average."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Rounding at random is unbiased."""
        return replace(super().traits, unbiased=self.rounding == "stochastic")

    def encoder_settings(self) -> dict[str, float]:
        """The largest code and the rounding."""
        return {"largest": self.largest, "stochastic": self.rounding == "stochastic"}

    @property
    def largest_level(self) -> int:
        """The largest code."""
        return self.largest


@dataclass(frozen=True, kw_only=True)
class Int8(Integer):
    """Send each value as one of 255 multiples of its block's unit.

        unit = max |g| / 127 over a block,   decoded = unit * round(g / unit)

    Reference: Dettmers 2015, arXiv:1511.04561 (8-bit gradients); Dettmers et al. 2021, arXiv:2110.02861 (blockwise).
    """

    name: ClassVar[str] = "int8"
    good_for: ClassVar[str] = "a quarter of the bytes at no cost in loss"
    largest: ClassVar[int] = 127

    @property
    @computed_once
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=-0.004, loss_deviation=0.007)


@dataclass(frozen=True, kw_only=True)
class Int4(Integer):
    """Send each value as one of 15 multiples of its block's unit, two values to a byte.

        unit = max |g| / 7 over a block,   decoded = unit * round(g / unit)

    Reference: Wang et al. 2023, arXiv:2306.10209 (ZeRO++, blockwise 4-bit gradients).
    """

    name: ClassVar[str] = "int4"
    good_for: ClassVar[str] = "an eighth of the bytes, best with stochastic rounding or error feedback"
    largest: ClassVar[int] = 7

    @property
    @computed_once
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=-0.006, loss_deviation=0.024)
