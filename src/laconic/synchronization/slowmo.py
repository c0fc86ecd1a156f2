"""Slow momentum on top of local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.stateful import Resize
from laconic.settings import number
from laconic.synchronization.families.timed import TimedLocalUpdates

_MOMENTUM = "slowmo.momentum"


@dataclass(frozen=True, kw_only=True)
class SlowMo(TimedLocalUpdates):
    """Train alone for `period` steps, then take an outer step with momentum along the mean change.

        u <- beta u + (x_old - mean_i(x_i)) / gamma,   x <- x_old - alpha gamma u      gamma: the learning rate

    With alpha = 1 this is block-wise model update filtering (BMUF); with beta = 0 as well, local SGD.

    Reference: Wang et al. 2020, arXiv:1910.00643; Chen & Huo 2016 (BMUF).
    """

    name: ClassVar[str] = "slowmo"
    elastic: ClassVar[bool] = True
    acts_alone: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "copy"}

    alpha: float = number(1.0, above=0.0)
    """The slow learning rate."""
    beta: float = number(0.7, at_least=0.0, at_most=0.999)
    """The slow momentum."""

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        momentum = memory[_MOMENTUM]
        if rate == 0:
            # The limit for a learning rate of zero, which leaves u unchanged.
            anchor.add_(change, alpha=-self.alpha)
            return
        momentum.mul_(self.beta).add_(change, alpha=1 / rate)
        anchor.add_(momentum, alpha=-self.alpha * rate)
