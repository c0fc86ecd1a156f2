"""DiLoCo without an all-reduce: the outer step is made with one random partner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange
from laconic.core.stateful import BucketState, Resize
from laconic.settings import number
from laconic.synchronization.contract import Average, LocalUpdates

_MOMENTUM = "noloco.momentum"
_GONE = 1e-7
"""The share of a momentum below which it no longer changes a float32 value."""


@dataclass(frozen=True, kw_only=True)
class NoLoCo(LocalUpdates):
    """Train alone for `period` steps, then make an outer step with a few neighbours' mean, drawn towards their anchors.

        d_i = a_i - x_i                                               a_i: replica i's own anchor, x_old
        u_i <- beta u_i + lr mean_j(d_j) + gamma (a_i - mean_j(a_j)),   a_i <- a_i - u_i,   x_i <- a_i

    j: replica i and its partner; with "gossip(topology=random_pairs)", as published, another one in every round. No
    replica waits for all, and a round sends N bytes however many replicas there are. Both means are one exchange, of
    lr d_j - gamma a_j. The term with gamma keeps replicas together, so they differ after rounds too, by little:
    session.average() makes one model of them.

    Reference: Kolehmainen et al. 2025, arXiv:2506.10911, where beta, lr and gamma are called alpha, beta and gamma.
    """

    name: ClassVar[str] = "noloco"
    acts_alone: ClassVar[bool] = True
    needs_everyone: ClassVar[bool] = False
    among_neighbours: ClassVar[bool] = True
    partners: ClassVar[Mapping[str, str]] = {"architecture": "gossip(topology=random_pairs)"}
    # Those of different replicas are similar: a new one continues best with another's.
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "copy"}

    lr: float = number(0.7, above=0.0)
    """The outer learning rate."""
    momentum: float = number(0.5, at_least=0.0, at_most=0.95)
    """beta: the outer momentum."""
    gamma: float = number(1.0, above=0.0, at_most=2.0)
    """The step of a replica's anchor towards the mean of its own and its partner's; 1: all the way."""

    @property
    def lasting_rounds(self) -> int:
        return 1 + (math.ceil(math.log(_GONE) / math.log(self.momentum)) if self.momentum else 0)

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Average lr d - gamma a."""
        flat.mul_(self.lr).add_(state.flat[self.anchor], alpha=-self.gamma)
        yield from average(flat, None)

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        momentum = memory[_MOMENTUM]
        momentum.mul_(self.momentum).add_(change).add_(anchor, alpha=self.gamma)
        anchor -= momentum
