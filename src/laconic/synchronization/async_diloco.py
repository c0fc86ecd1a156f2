"""Many local steps, then an outer step that servers make for each worker by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.errors import InvalidSetting
from laconic.settings import count, number, share
from laconic.synchronization.contract import Asynchronous, Quantity

_MOMENTUM = "momentum"
_GATHERED = "gathered"


@dataclass(frozen=True, kw_only=True)
class AsyncDiLoCo(Asynchronous):
    """Train alone for `period` steps; servers apply each worker's change at once, with delayed Nesterov momentum.

        worker i, after `period` steps:        send d = x_old - x_i,   get x,   x_old <- x_i <- x
        server, on the change d of a worker:   s <- s + d
            on every N-th change:              u <- beta u + s / N,   s <- 0,   w = 1 - spread + spread / N
            on the others:                     w = spread / N
                                               x <- x - lr (d / N + w beta u)

    No worker waits for another. The servers refresh the momentum u only once in N changes, so that stale changes of
    fast and slow workers are averaged in it, and N changes together move parameters as far as one outer step of diloco
    with their mean. Each worker keeps its inner optimizer's state.

    Reference: Liu et al. 2024, arXiv:2401.09135, where spread is c N; its Dynamic Local Updates, which give slow
    workers fewer local steps, are not included.
    """

    name: ClassVar[str] = "async_diloco"
    quantity: ClassVar[Quantity] = "change"
    partners: ClassVar[Mapping[str, str]] = {"architecture": "parameter_server"}
    server_fields: ClassVar[tuple[str, ...]] = (_MOMENTUM, _GATHERED)

    period: int = count(32, at_least=1)
    """Optimizer steps of a worker between two exchanges with the servers."""
    lr: float = number(0.7, above=0.0)
    """The outer learning rate."""
    momentum: float = number(0.9, at_least=0.0, at_most=0.999)
    """The outer momentum."""
    buffer: int = count(0)
    """N: the momentum is refreshed with the mean of N changes. 0: the number of workers."""
    spread: float = share(0.0, above=None, at_least=0.0)
    """The share of the momentum's step that is made in equal parts on all N changes; the rest is made on the N-th."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spread and (self.buffer == 1 or not self.momentum):
            why = "buffer=1, where every change is the N-th" if self.buffer == 1 else "momentum=0"
            raise InvalidSetting(f"{self.axis}.{self.name}.spread has no effect with {why}. Leave spread out.")

    @property
    def interval(self) -> int:
        return self.period

    def arrive(
        self,
        values: torch.Tensor,
        change: torch.Tensor,
        memory: Mapping[str, torch.Tensor],
        *,
        arrival: int,
        world_size: int,
    ) -> None:
        momentum, gathered, num_changes = memory[_MOMENTUM], memory[_GATHERED], self.buffer or world_size
        gathered += change
        weight = self.spread / num_changes
        if (arrival + 1) % num_changes == 0:
            momentum.mul_(self.momentum).add_(gathered, alpha=1 / num_changes)
            gathered.zero_()
            weight += 1 - self.spread
        values.add_(change, alpha=-self.lr / num_changes)
        values.add_(momentum, alpha=-self.lr * weight * self.momentum)
