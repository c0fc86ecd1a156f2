"""Exchange everything after the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.plan import Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.scheduling.contract import Schedule, one_bucket_per_kind


@dataclass(frozen=True, kw_only=True)
class Sequential(Schedule):
    """One fused exchange after the whole backward pass; nothing overlaps.

    step time = forward + backward + exchange
    """

    name: ClassVar[str] = "sequential"

    def plan(
        self, tensors: Sequence[TensorSpec], *, observed: bool, timing: Timing | None = None, candidate: int = 0
    ) -> Plan:
        """One bucket per dtype and device, sent when the backward pass has ended."""
        return Plan(one_bucket_per_kind(tensors), launch="after_backward")
