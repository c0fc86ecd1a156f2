"""Asynchronous parallel training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from laconic.settings import choice, number
from laconic.synchronization.contract import Asynchronous


@dataclass(frozen=True, kw_only=True)
class Asp(Asynchronous):
    """Workers never wait for each other.

        server, on a gradient of worker i:   g <- g + lambda g * g * (x - x_then),   x <- optimizer(x, g)

    x_then are the parameters that worker i last received, and staleness is the number of gradients of other workers
    applied since. With gossip there is no server: pairs of replicas average in the background (AD-PSGD).

    Reference: Dean et al. 2012 (Downpour), NeurIPS; Zhang et al. 2016 (staleness-aware), arXiv:1511.05950; Zheng et al.
    2017 (delay compensation), arXiv:1609.08326.
    """

    name: ClassVar[str] = "asp"
    partners: ClassVar[Mapping[str, str]] = {"architecture": "parameter_server"}
    for_servers: ClassVar[tuple[str, ...]] = ("learning_rate", "delay_compensation")

    learning_rate: str = choice("mean", "staleness", "full")
    """mean: divided by the number of workers, so that one gradient of each moves parameters as far as their mean.
    staleness: divided by 1 + staleness. full: that of the optimizer."""
    delay_compensation: float = number(0.0, at_least=0.0)
    """lambda; 0: no correction."""

    @property
    def compensation(self) -> float:
        return self.delay_compensation

    def rate(self, world_size: int, staleness: int) -> float:
        return {"mean": 1 / world_size, "staleness": 1 / (1 + staleness), "full": 1.0}[self.learning_rate]
