"""Local steps corrected by the difference between a replica's own direction and the mean direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange
from laconic.core.stateful import BucketState, Resize
from laconic.synchronization.contract import Average, LocalUpdates

_CORRECTION = "scaffold.correction"
_OWN = "scaffold.own"


@dataclass(frozen=True, kw_only=True)
class Scaffold(LocalUpdates):
    """Local SGD whose replicas subtract in every step the part of their last round that the others did not share.

        x_i <- optimizer(x_i - lr e_i, g_i)   in every step
        d_i = x_old - x_i,   d = mean_i(d_i),   x_i <- x_old - d,   e_i <- e_i + (d - d_i) / (H lr)   every H steps

    e_i = c - c_i, the difference of the control variates of the paper (its option II), follows from d and d_i, so only
    d is sent, where the paper sends c_i as well. With plain SGD these are the paper's steps; with another optimizer e_i
    corrects updates instead of gradients. A round with a learning rate of zero does not change e_i. SCAFFOLD is meant
    for heterogeneous (non-IID) data: data that differ between workers. The e_i of all replicas add up to zero, but for
    what compression loses, so a lossy compressor needs error feedback.

    Reference: Karimireddy et al. 2020, arXiv:1910.06378.
    """

    name: ClassVar[str] = "scaffold"
    corrects: ClassVar[bool] = True
    adds_up_differences: ClassVar[bool] = True
    # Corrections of all replicas add up to zero; those of the remaining ones would not.
    fields: ClassVar[Mapping[str, Resize]] = {_CORRECTION: "reset", _OWN: "reset"}

    def correct(self, values: torch.Tensor, anchor: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        values.add_(memory[_CORRECTION], alpha=-rate)

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Average changes, and keep this replica's own."""
        state.flat[_OWN].copy_(flat).mul_(state.moment.world_size)  # changes are scaled by 1/n
        yield from average(flat, None)

    def outer(self, anchor: torch.Tensor, change: torch.Tensor, memory: dict[str, torch.Tensor], rate: float) -> None:
        anchor -= change
        if rate:
            memory[_CORRECTION].add_(change - memory[_OWN], alpha=1.0 / (self.period * rate))
