"""Train alone for a while, then average parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.errors import InvalidSetting
from laconic.settings import count
from laconic.synchronization.contract import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class LocalSgd(LocalUpdates):
    """Make `period` steps alone, then average parameters.

        x_i <- mean_j(x_j)   every H steps

    post_local: for that many steps average in every step, and only then every H steps: early steps decide much, and
    replicas that part later end at better solutions (post-local SGD). Any optimizer; its state stays local.

    Reference: Stich 2019, arXiv:1805.09767; Lin et al. 2020 (post-local SGD), arXiv:1808.07217.
    """

    name: ClassVar[str] = "local_sgd"
    needs_everyone: ClassVar[bool] = False

    post_local: int = count(0)
    """Steps at the beginning after each of which parameters are averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.post_local and self.period == 1:
            raise InvalidSetting(
                f"{self.axis}.{self.name}.post_local={self.post_local} has no effect with period=1, which averages in "
                "every step from the beginning to the end. Leave post_local out, or give a longer period."
            )

    @property
    def warmup(self) -> int:
        """See Synchronization."""
        return self.post_local

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        """See Synchronization."""
        anchor -= change
