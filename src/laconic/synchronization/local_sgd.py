"""Train alone for a while, then average parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

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

    @property
    def warmup(self) -> int:
        """See LocalUpdates."""
        return self.post_local

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        """See LocalUpdates."""
        anchor -= change
