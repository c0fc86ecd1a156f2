"""Begin without compression, or with less of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.compression.families.by_step import ByStep
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.errors import AttachError
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class Warmup(ByStep):
    """Send uncompressed values, or those of `first`, for the first steps; then use the wrapped method.

        decoded = decode(C_first(g))  while step < steps,   decode(C(g))  from then on

    Early gradients change fast, and losses of compression in them are hard to make up for later. Wrappers outside of it
    (error_feedback, momentum_correction) work from the first step on, those inside from `steps` on.

    Reference: Lin et al. 2018, arXiv:1712.01887; Vogels et al. 2019, arXiv:1905.13727.
    """

    name: ClassVar[str] = "warmup"
    good_for: ClassVar[str] = "methods that lose much of early gradients"
    first_setting: ClassVar[str] = "steps"
    needs_loss: ClassVar[bool] = True

    steps: int = count(1000, at_least=1)
    """Optimizer steps before the wrapped method begins, counted from the start of training."""

    def check_length(self, total_steps: int) -> None:
        """Raise if all of training would be warm-up."""
        if self.steps >= total_steps:
            raise AttachError(
                f"compression.warmup.steps={self.steps} covers all of a training of {total_steps} steps: "
                f'"{self.inner}" would never be used. Give fewer warmup steps.'
            )
        super().check_length(total_steps)

    def is_first(self, bucket: Bucket, moment: Moment) -> bool:
        return moment.step < self.steps
