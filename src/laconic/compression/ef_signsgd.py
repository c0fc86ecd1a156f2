"""Send signs, and the mean magnitude of each block; made for error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.compression.families.quantizer import Quantizer
from laconic.compression.traits import Traits, computed_once
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class EfSignSgd(Quantizer):
    """Send the sign of every value and, per block, the mean of the magnitudes.

        decoded = (L1(p) / d) * sign(p),   d values in a block,   zero counts as positive

    The residual p = g + e of the method's name comes from the wrapper: "ef_signsgd + error_feedback".

    Reference: Karimireddy et al. 2019, arXiv:1901.09847.
    """

    name: ClassVar[str] = "ef_signsgd"
    good_for: ClassVar[str] = "one bit with any optimizer, if error feedback may cost memory"
    encoder: ClassVar[str] = "scaled_sign"
    decoder: ClassVar[str] = "sign"

    block: int = count(1024, at_least=32, at_most=65536)
    """Values that share a scale; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """One bit per value loses most of it."""
        return replace(super().traits, wants_error_feedback=True, loss_gap=0.157, loss_deviation=0.044)

    @property
    def bits(self) -> int:
        """One."""
        return 1
