"""Adam whose momentum is exchanged in one bit per value, once its second moment has settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Average gradients at first; then freeze Adam's second moment and average its momentum, compressed.

        step < T    g <- mean_i(C_first(g_i)),   Adam as it is
        from T on   m_i = b1 m + (1 - b1) g_i,   m <- mean_i(C(m_i)),   x <- x - lr m / (sqrt(v_T) + eps)

    C is the compressor of the strategy; left off, one bit with error feedback. Error feedback makes what is sent add up
    to what was meant, which is right for a momentum that is applied as it is, and wrong for a gradient that Adam
    divides by the size of what arrives. The optimizer stays Adam or AdamW: it is given its momentum, and its second
    moment is kept as it was at step T, but not below `floor` times the mean of its tensor. T = warmup * total_steps.

    Gradients are gone after step T: what clip_grad_norm_ clips is then the momentum.

    Reference: Tang et al. 2021, arXiv:2102.02888.
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

    def steers(self, step: int) -> bool:
        """See Synchronization."""
        return step >= self.warmup

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Average the gradient, or put the mean momentum in its place."""
        moment = state.moment
        if not self.steers(moment.step):
            yield from average(flat, None)
            return
        momentum, beta = state.flat[_MOMENTUM], moment.momentum
        # Gradients come scaled by 1/n, and so must what is added to them.
        flat.mul_(1.0 - beta).add_(momentum, alpha=beta / moment.world_size)
        yield from average(flat, None)
        # What is not finite is for everyone to see: a GradScaler skips the step, and the momentum stays.
        momentum.copy_(torch.where(torch.isfinite(flat), flat, momentum))
