"""Adam whose momentum is exchanged in one bit per value, once its second moment has settled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import torch

from laconic.core.exchange import Exchange
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.stateful import BucketState, Resize
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import choice, count, share
from laconic.synchronization.contract import Average, Quantity, Synchronization

_MOMENTUM = "onebit_adam.momentum"


@dataclass(frozen=True, kw_only=True)
class OnebitAdam(Synchronization):
    """Average gradients at first; then average Adam's momentum, compressed, with a second moment that hardly changes.

        step < T    g <- mean_i(C_first(g_i)),   Adam as it is
        from T on   m_i = b1 m + (1 - b1) g_i,   m <- mean_i(C(m_i)),   x <- x - lr m / (sqrt(v) + eps)
        refresh     g <- mean_i(C_first(g_i)),   m <- b1 m + (1 - b1) g,   v <- (1 - w) v + w g^2

    C is the compressor of the strategy; left off, one bit with error feedback. Error feedback makes what is sent add up
    to what was meant, which is right for a momentum that is applied as it is, and wrong for a gradient that Adam
    divides by the size of what arrives. T = warmup * total_steps; v is refreshed whenever the number of steps has grown
    by the share `refresh`, w = (1 - b2) / (1 - b2^k) for the k-th gradient that it takes in, and at T no element of it
    is below `floor` times the mean of its tensor. The optimizer stays Adam or AdamW: it is given m and v.

    Between refreshes there are no gradients: what clip_grad_norm_ clips is then the momentum.

    Reference: Tang et al. 2021, arXiv:2102.02888 (without refresh); Lu et al. 2022, arXiv:2202.06009 (with it).
    """

    name: ClassVar[str] = "onebit_adam"
    quantity: ClassVar[Quantity] = "momentum"
    replicas_identical: ClassVar[bool] = True
    needs_everyone: ClassVar[bool] = True
    partners: ClassVar[Mapping[str, str]] = {"compression": "onebit + error_feedback"}
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "copy"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_MOMENTUM})

    warmup_share: float = share(0.1)
    """The share of all steps in which gradients are averaged and Adam is as it is."""
    total_steps: int = count(0)
    """Optimizer steps of the whole training; 0: attach() is told."""
    first: str = choice("int8", "none", "bf16", "int4")
    """How gradients are sent in those steps."""
    refresh_share: float = share(0.05, above=None, at_least=0.0)
    """v is refreshed when so large a share of the steps so far has been made since; 0: it stays as it was at T."""
    floor: float = share(0.01, above=None, at_least=0.0)
    """The least second moment of an element when it is frozen, as a share of its tensor's mean."""

    @property
    def warmup(self) -> int:
        """See Synchronization."""
        return max(1, round(self.warmup_share * self.total_steps))

    @property
    def asks_for_length(self) -> bool:
        """See Synchronization."""
        return not self.total_steps

    @property
    def beginning(self) -> str:
        """See Synchronization."""
        return self.first

    @property
    def variance_floor(self) -> float:
        """See Synchronization."""
        return self.floor

    def planned(self, total_steps: int) -> Self:
        """See Synchronization."""
        if self.total_steps not in (0, total_steps):
            raise AttachError(
                f"synchronization.onebit_adam.total_steps is {self.total_steps}, and attach() was given {total_steps}. "
                "Give it in one place."
            )
        return replace(self, total_steps=total_steps)

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if the length of training is not known, or the optimizer has no momentum of Adam's kind."""
        if self.asks_for_length:
            raise AttachError(
                "synchronization.onebit_adam begins when a share of all steps is over: say how many there will be, by "
                'attach(..., total_steps=1000) or "onebit_adam(total_steps=1000)".'
            )
        optimizer.check_adam("synchronization.onebit_adam")

    def begins(self, step: int) -> bool:
        """See Synchronization."""
        return step < self.warmup or step in self._refreshes()

    def refresh(self, step: int, beta2: float) -> float:
        """See Synchronization."""
        refreshes = self._refreshes()
        if step not in refreshes:
            return 0.0
        return (1.0 - beta2) / (1.0 - beta2 ** (self.warmup + refreshes[step]))

    def _refreshes(self) -> Mapping[int, int]:
        return _refreshes(self.warmup, self.refresh_share, self.total_steps)

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Average the gradient, or put the mean momentum in its place."""
        moment = state.moment
        if self.begins(moment.step):
            yield from average(flat, None)
            return
        momentum, beta = state.flat[_MOMENTUM], moment.momentum
        # Gradients come scaled by 1/n, and so must what is added to them.
        flat.mul_(1.0 - beta).add_(momentum, alpha=beta / moment.world_size)
        yield from average(flat, None)
        # What is not finite is for everyone to see: a GradScaler skips the step, and the momentum stays.
        momentum.copy_(torch.where(torch.isfinite(flat), flat, momentum))


@lru_cache(maxsize=64)
def _refreshes(warmup: int, share: float, total_steps: int) -> dict[int, int]:
    """The steps after the warm-up in which the second moment is refreshed, each with its number, from 1 on."""
    steps: dict[int, int] = {}
    step = warmup
    while share and (step := max(step + 1, math.ceil(step * (1.0 + share)))) < total_steps:
        steps[step] = len(steps) + 1
    return steps
