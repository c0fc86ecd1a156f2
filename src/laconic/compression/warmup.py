"""Begin without compression, or with less of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.compression.families.by_step import ByStep
from laconic.errors import AttachError
from laconic.settings import Setting, count


@dataclass(frozen=True, kw_only=True)
class Warmup(ByStep):
    """Send everything as it is, or as `first` does, for the first steps, then as the wrapped method does.

        decoded = decode(C_first(g))  while step < steps,   decode(C(g))  from then on

    Early gradients change fast and decide much; what compression loses of them is hard to make good later. Wrappers
    outside of it (error_feedback, momentum_correction) work from the first step on, those inside from `steps` on.

    Reference: Lin et al. 2018, arXiv:1712.01887; Vogels et al. 2019, arXiv:1905.13727.
    """

    name: ClassVar[str] = "warmup"
    needs_loss: ClassVar[bool] = True

    steps: int = count(1000, at_least=1)
    """Optimizer steps before the wrapped method begins, counted from the start of training."""

    @classmethod
    def declared(cls) -> dict[str, Setting]:
        """The steps first, so that warmup(1000) means what it says."""
        declared = super().declared()
        return {"steps": declared.pop("steps"), **declared}

    def check_length(self, total_steps: int) -> None:
        """Raise if all of training would be warm-up."""
        if self.steps >= total_steps:
            raise AttachError(
                f"compression.warmup.steps={self.steps} is all of a training of {total_steps} steps: "
                f'"{self.inner}" would never be used. Give fewer.'
            )
        super().check_length(total_steps)

    def is_first(self, step: int) -> bool:
        """See ByStep."""
        return step < self.steps
