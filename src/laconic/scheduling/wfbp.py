"""Wait-free backpropagation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.scheduling.contract import Schedule


@dataclass(frozen=True, kw_only=True)
class Wfbp(Schedule):
    """Exchange each tensor by itself as soon as its gradient is ready, overlapped with the rest of the backward pass.

    Reference: Zhang et al. 2017 (Poseidon), arXiv:1706.03292.
    """

    name: ClassVar[str] = "wfbp"

    def plan(
        self, tensors: Sequence[TensorSpec], *, observed: bool, timing: Timing | None = None, candidate: int = 0
    ) -> Plan:
        """One bucket per tensor; before an order has been observed, the last registered one goes first."""
        order = tensors if observed else reversed(tensors)
        return Plan(tuple(Bucket((tensor,)) for tensor in order))
