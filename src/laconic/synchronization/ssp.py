"""Stale-synchronous parallel training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from laconic.settings import choice, count
from laconic.synchronization.contract import Asynchronous


@dataclass(frozen=True, kw_only=True)
class Ssp(Asynchronous):
    """The fastest worker may be at most `staleness` steps ahead of the slowest.

        worker i continues after step c   when   c - min_j(c_j) <= staleness

    The server keeps the clocks, and delays its answer to a worker that is too far ahead.

    Reference: Ho et al. 2013, NeurIPS.
    """

    name: ClassVar[str] = "ssp"
    partners: ClassVar[Mapping[str, str]] = {"architecture": "parameter_server"}
    needs_clocks: ClassVar[bool] = True

    staleness: int = count(3)
    """The number of steps by which the fastest worker may be ahead of the slowest."""
    learning_rate: str = choice("mean", "full")
    """mean: divided by the number of workers, so that one gradient of each moves parameters as far as their mean.
    full: that of the optimizer."""

    @property
    def lead(self) -> int | None:
        return self.staleness

    def rate(self, world_size: int, staleness: int) -> float:
        return 1 / world_size if self.learning_rate == "mean" else 1.0
