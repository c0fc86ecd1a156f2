"""Bulk-synchronous parallel training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.synchronization.contract import Quantity, Synchronization


@dataclass(frozen=True, kw_only=True)
class Bsp(Synchronization):
    """Average gradients over all workers in every step.

        g = (1/n) sum_i g_i,   x <- optimizer(x, g)

    Reference: Valiant 1990, "A bridging model for parallel computation".
    """

    name: ClassVar[str] = "bsp"
    elastic: ClassVar[bool] = True
    quantity: ClassVar[Quantity] = "gradient"
    replicas_identical: ClassVar[bool] = True
