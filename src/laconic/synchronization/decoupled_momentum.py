"""Exchange only the fast-moving components of each replica's outer momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange
from laconic.core.stateful import BucketState, Resize
from laconic.settings import number
from laconic.synchronization.contract import Average, LocalUpdates, exchange_momentum

_MOMENTUM = "decoupled_momentum.momentum"


@dataclass(frozen=True, kw_only=True)
class DecoupledMomentum(LocalUpdates):
    """DiLoCo whose momentum stays local, except for its fast-moving components.

        m_i <- beta m_i + (x_old - x_i),   q_i = C(m_i),   m_i <- m_i - q_i,   x <- x_old - lr mean_i(q_i)

    C is the compressor of the strategy; left off, dct_topk as published: the chunked cosine transform of the momentum,
    of which only the largest coefficients are exchanged. The others stay in the momentum of each replica.

    Reference: Iacob et al. 2025, arXiv:2510.03371 (decoupled momentum); Peng et al. 2024 (DeMo), arXiv:2411.19870.
    """

    name: ClassVar[str] = "decoupled_momentum"
    elastic: ClassVar[bool] = True
    acts_alone: ClassVar[bool] = True
    remembers_unsent: ClassVar[bool] = True
    partners: ClassVar[Mapping[str, str]] = {"compression": "dct_topk"}
    # Changes are scaled by 1/n, so unsent values of several workers add up.
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "sum"}
    owed_fields: ClassVar[frozenset[str]] = frozenset({_MOMENTUM})

    lr: float = number(0.7, above=0.0)
    """The outer learning rate."""
    beta: float = number(0.9, at_least=0.0, at_most=0.999)
    """The share of the unsent momentum that is kept until the next outer step."""

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Exchange the part of the momentum that the compressor selects."""
        return exchange_momentum(state.flat[_MOMENTUM], self.beta, flat, average)

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor.add_(change, alpha=-self.lr)
