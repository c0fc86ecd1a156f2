"""Adam whose second moment is that of mean gradients on all replicas, and hardly changes after a while."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.settings import choice, count, share
from laconic.synchronization.contract import Quantity, Synchronization


@dataclass(frozen=True, kw_only=True)
class SharedVariance(Synchronization):
    """Gradients are averaged in the first steps and at refreshes; only then the second moment changes.

        step < T    g <- mean_i(C_first(g_i)),   Adam as it is
        refresh     g <- mean_i(C_first(g_i)),   m <- b1 m + (1 - b1) g,   v <- (1 - w) v + w g^2
        otherwise   v does not change, and the rule decides what is exchanged

    T = warmup_share * total_steps; v is refreshed whenever the number of steps has grown by refresh_share,
    w = (1 - b2) / (1 - b2^k) for the k-th gradient that it takes in, and at T no element of it is below `floor` times
    the mean of its tensor.
    """

    needs_everyone: ClassVar[bool] = True
    needs_adam: ClassVar[bool] = True
    quantity: ClassVar[Quantity] = "momentum"
    partners: ClassVar[Mapping[str, str]] = {"compression": "onebit + error_feedback"}

    warmup_share: float = share(0.1)
    """The share of all steps in which gradients are averaged and Adam is unchanged."""
    total_steps: int = count(0)
    """Optimizer steps of the whole training; 0: given to attach()."""
    first: str = choice("int8", "none", "bf16", "int4")
    """How gradients are sent in those steps."""
    refresh_share: float = share(0.05, above=None, at_least=0.0)
    """v is refreshed whenever the number of steps has grown by this share; 0: it stays as it was at T."""
    floor: float = share(0.01, above=None, at_least=0.0)
    """The least second moment of an element when it is frozen, as a share of its tensor's mean."""

    @property
    def warmup(self) -> int:
        return max(1, round(self.warmup_share * self.total_steps))

    @property
    def asks_for_length(self) -> bool:
        return not self.total_steps

    @property
    def beginning(self) -> str:
        return self.first

    @property
    def variance_floor(self) -> float:
        return self.floor

    def planned(self, total_steps: int) -> Self:
        if self.total_steps not in (0, total_steps):
            raise AttachError(
                f"synchronization.{self.name}.total_steps is {self.total_steps}, and attach() was given {total_steps}. "
                "Give it in one place."
            )
        return replace(super().planned(total_steps), total_steps=total_steps)

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Raise if the length of training is not known, or the optimizer has no momentum like Adam's."""
        if self.asks_for_length:
            raise AttachError(
                f"synchronization.{self.name} begins after a share of all steps: give the total number of steps, by "
                f'attach(..., total_steps=1000) or "{self.name}(total_steps=1000)".'
            )
        optimizer.check_adam(f"synchronization.{self.name}")

    def begins(self, step: int) -> bool:
        return step < self.warmup or step in self.refreshes()

    def refresh(self, step: int, beta2: float) -> float:
        refreshes = self.refreshes()
        if step not in refreshes:
            return 0.0
        return (1.0 - beta2) / (1.0 - beta2 ** (self.warmup + refreshes[step]))

    def refreshes(self) -> Mapping[int, int]:
        """The steps after the warm-up in which the second moment is refreshed, each with its number, from 1 on."""
        return _refreshes(self.warmup, self.refresh_share, self.total_steps)


@lru_cache(maxsize=64)
def _refreshes(warmup: int, share: float, total_steps: int) -> dict[int, int]:
    """The steps after the warm-up in which the second moment is refreshed, each with its number, from 1 on."""
    steps: dict[int, int] = {}
    step = warmup
    while share and (step := max(step + 1, math.ceil(step * (1.0 + share)))) < total_steps:
        steps[step] = len(steps) + 1
    return steps
