"""Local steps that stay near the parameters that replicas last agreed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.settings import number
from laconic.synchronization.contract import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class FedProx(LocalUpdates):
    """Local SGD whose replicas are drawn back to the parameters last agreed on in every step.

        x_i <- optimizer(x_i - lr mu (x_i - x_old), g_i),    x_i <- mean_j(x_j)   every H steps

    g_i is the gradient at x_i, so with plain SGD this descends F_i(x) + mu/2 |x - x_old|^2, as published. Another
    optimizer makes its own step in addition, as AdamW does with weight decay. FedProx is meant for heterogeneous
    (non-IID) data: data that differ between workers.

    Reference: Li et al. 2020, arXiv:1812.06127.
    """

    name: ClassVar[str] = "fedprox"
    acts_alone: ClassVar[bool] = True
    corrects: ClassVar[bool] = True

    mu: float = number(0.1, above=0.0)
    """The strength of the pull towards x_old; one step moves a replica by the share lr * mu of its distance."""

    def correct(self, values: torch.Tensor, anchor: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        values.lerp_(anchor, min(1.0, rate * self.mu))

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor -= change
