"""Adam with a common second moment, whose replicas make local steps and exchange the sum of momenta in one bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange
from laconic.core.stateful import BucketState, Resize
from laconic.settings import count
from laconic.synchronization.contract import Average
from laconic.synchronization.families.shared_variance import SharedVariance

_MOMENTUM = "zero_one_adam.momentum"
_SUM = "zero_one_adam.sum"
_ANCHOR = "zero_one_adam.anchor"


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(SharedVariance):
    """1-bit Adam with local steps: exchange the sum of several steps' momenta, compressed.

        step < T   g <- mean_i(C_first(g_i)),   Adam as it is
        then       m_i <- b1 m_i + (1 - b1) g_i,   u_i <- u_i + m_i,   x_i <- x_i - lr m_i / (sqrt(v) + eps)
        a round    u <- mean_i(C(u_i)),   x_i <- x_old - lr u / (sqrt(v) + eps),   m_i <- u / k,   u_i <- 0
        refresh    g <- mean_i(C_first(g_i)) in place of g_i,   v <- (1 - w) v + w g^2

    A round ends each `period` of steps; k is the number of steps since the last round. x_old are the parameters after
    that round, with the weight decay of the steps since. v, T and refreshes are those of onebit_adam. The steps of a
    round count with its last learning rate. Published with rounds that become rarer up to every 16th step; `period` is
    constant here.

    Between refreshes there are no gradients: clip_grad_norm_ clips momenta, and in a round their sum.

    Reference: Lu et al. 2022, arXiv:2202.06009.
    """

    name: ClassVar[str] = "zero_one_adam"
    replicas_identical: ClassVar[bool] = False
    # An unfinished sum belongs to parameters that other workers do not have.
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "copy", _SUM: "reset", _ANCHOR: "copy"}
    # An overflow in a local step would give the replica a loss scale of its own.
    scale_equivariant: ClassVar[bool] = False
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_MOMENTUM, _SUM})

    period: int = count(4, at_least=2, advice='To exchange momentum in every step use "onebit_adam".')
    """Optimizer steps between two rounds, once gradients are no longer averaged."""

    @property
    def interval(self) -> int:
        return self.period

    def due(self, num_steps: int) -> list[int]:
        return [0] if self.begins(num_steps - 1) or self.returns(num_steps - 1) else []

    def returns(self, step: int) -> bool:
        return step >= self.warmup and (step + 1) % self.period == 0

    def refreshes(self) -> Mapping[int, int]:
        """As in the base class, but one step later where a round is due."""
        later = {step + self.returns(step): number for step, number in super().refreshes().items()}
        return {step: number for step, number in later.items() if step < self.total_steps}

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Average the gradient, or add it to the momentum alone; at the end of a round, average the sum of momenta."""
        moment = state.moment
        if self.begins(moment.step):
            yield from average(flat, None)
            if moment.step < self.warmup:
                return
            gradient = flat
        else:
            gradient = flat * moment.world_size  # gradients are scaled by 1/n
        momentum, total, beta = state.flat[_MOMENTUM], state.flat[_SUM], moment.momentum
        # Values that are not finite reach the optimizer, and are not kept in the state.
        new = momentum * beta + gradient * (1.0 - beta)
        momentum.copy_(torch.where(new.isfinite(), new, momentum))
        total += momentum
        if self.begins(moment.step):
            return
        flat.copy_(new)
        if self.returns(moment.step):
            count = moment.step + 1 - max(moment.step + 1 - self.period, self.warmup)
            flat.copy_(torch.where(new.isfinite(), total, new)).div_(moment.world_size)
            yield from average(flat, None)
            momentum.copy_(torch.where(flat.isfinite(), flat / count, momentum))
            total.zero_()
