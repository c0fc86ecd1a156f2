"""Many local steps, then an outer step with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.stateful import Resize
from laconic.settings import number
from laconic.synchronization.contract import nesterov
from laconic.synchronization.families.timed import TimedLocalUpdates

_MOMENTUM = "diloco.momentum"


@dataclass(frozen=True, kw_only=True)
class DiLoCo(TimedLocalUpdates):
    """Train alone for `period` steps, then take an outer Nesterov step along the mean change.

        d = mean_i(x_old - x_i),   u <- beta u + d,   x <- x_old - lr (d + beta u)

    Each replica keeps its inner optimizer's state; the outer momentum is the same on all.

    Reference: Douillard et al. 2023, arXiv:2311.08105.
    """

    name: ClassVar[str] = "diloco"
    elastic: ClassVar[bool] = True
    acts_alone: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "copy"}

    lr: float = number(0.7, above=0.0)
    """The outer learning rate."""
    momentum: float = number(0.9, at_least=0.0, at_most=0.999)
    """The outer momentum."""

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        nesterov(anchor, change, memory[_MOMENTUM], self.lr, self.momentum)
