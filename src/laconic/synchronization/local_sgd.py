"""Train alone for a while, then average parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.errors import InvalidSetting
from laconic.settings import count
from laconic.synchronization.families.timed import TimedLocalUpdates


@dataclass(frozen=True, kw_only=True)
class LocalSgd(TimedLocalUpdates):
    """Train alone for `period` steps, then average parameters.

        x_i <- mean_j(x_j)   every H steps

    post_local: average in every step for that many steps, and only then every H steps: replicas that begin to differ
    later end at better solutions (post-local SGD). It works with any optimizer, whose state stays local.

    Reference: Stich 2019, arXiv:1805.09767; Lin et al. 2020 (post-local SGD), arXiv:1808.07217.
    """

    name: ClassVar[str] = "local_sgd"
    elastic: ClassVar[bool] = True
    needs_everyone: ClassVar[bool] = False

    post_local: int = count(0)
    """Number of steps at the start after each of which parameters are averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.post_local and self.period == 1:
            raise InvalidSetting(
                f"{self.axis}.{self.name}.post_local={self.post_local} has no effect with period=1, which averages in "
                "every step from the beginning to the end. Leave post_local out, or give a longer period."
            )

    @property
    def warmup(self) -> int:
        return self.post_local

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor -= change
