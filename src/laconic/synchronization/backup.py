"""Synchronous training with backup workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from laconic.errors import AttachError
from laconic.settings import count
from laconic.synchronization.contract import Asynchronous


@dataclass(frozen=True, kw_only=True)
class Backup(Asynchronous):
    """Average the first K = n - spare gradients of every step, and drop those that arrive later.

        S = the first K workers whose gradients at x arrive,   x <- optimizer(x, (1/K) sum_{i in S} g_i)

    A worker whose gradient arrives later gets the newest parameters at once and continues with these; its gradient is
    dropped, and session.dropped counts it. So up to `spare` slow workers delay no other worker, and no gradient in a
    mean is stale. One server receives the gradients of all workers, because one process must decide which came first.

    Reference: Chen et al. 2016, arXiv:1604.00981.
    """

    name: ClassVar[str] = "backup"
    partners: ClassVar[Mapping[str, str]] = {"architecture": "parameter_server(shards=1)"}
    takes_first: ClassVar[bool] = True

    spare: int = count(1, at_least=1, advice='To wait for all workers use "bsp / parameter_server".')
    """The number of workers that no step waits for; fewer than there are workers."""

    @property
    def sure_lead(self) -> int | None:
        """No step: a worker waits until enough others have arrived."""
        return 0

    def num_first(self, world_size: int) -> int:
        if self.spare >= world_size:
            raise AttachError(
                f"{self.axis}.{self.name}.spare must be < the number of workers ({world_size}), got {self.spare}: "
                'no gradient would be left to apply. Start more workers, or use "bsp".'
            )
        return world_size - self.spare

    def rate(self, world_size: int, staleness: int) -> float:
        return 1.0
