"""Elastic averaging: replicas are drawn towards a common center."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.settings import share
from laconic.synchronization.contract import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class Easgd(LocalUpdates):
    """Draw the center towards the mean of all replicas after every period, and each replica towards the center.

        c <- c + beta mean_i(x_i - c),   x_i <- x_i - alpha (x_i - c)

    Replicas stay apart and explore; the center is the model. session.average() gives the mean of replicas, which is
    near the center. With alpha = beta = 1 this is local SGD.

    Reference: Zhang et al. 2015, arXiv:1412.6651, whose alpha is beta / n, and which draws replicas towards the center
    as it was before the round.
    """

    name: ClassVar[str] = "easgd"
    acts_alone: ClassVar[bool] = True

    alpha: float = share(0.25)
    """How far a replica moves towards the center, as a share of its distance."""
    beta: float = share(0.9)
    """How far the center moves towards the mean of replicas, as a share of its distance."""

    @property
    def keep(self) -> float:
        return 1.0 - self.alpha

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor.add_(change, alpha=-self.beta)
