"""Merged-gradient wait-free backpropagation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.scheduling.contract import Schedule, one_bucket_per_kind


@dataclass(frozen=True, kw_only=True)
class MgWfbp(Schedule):
    """Merge neighbouring gradients where measured times say that exchanges then end sooner.

        end(j) = min over i < j of   max(end(i), ready(j)) + a + b bytes(i+1 .. j)

    Few large exchanges wait long for their last gradient, many small ones pay the start-up cost a every time; this is
    the best of all ways to cut the sequence, found by dynamic programming. a and b depend on what is sent: a
    compressor of several rounds has a larger a, and one that sends few bytes a smaller b. Until times have been
    measured, every tensor is sent by itself. The plan is made anew when times drift.

    Reference: Shi et al. 2019, arXiv:1811.11141; with sparse gradients Shi et al. 2020 (OMGS-SGD), INFOCOM.
    """

    name: ClassVar[str] = "mg_wfbp"
    needs_timing: ClassVar[bool] = True
    settles_after: ClassVar[int] = 5

    def plan(
        self, tensors: Sequence[TensorSpec], *, observed: bool, timing: Timing | None = None, candidate: int = 0
    ) -> Plan:
        """The best cut for each dtype and device; without times, one bucket per tensor."""
        if timing is None:
            order = tensors if observed else [*reversed(tensors)]
            return Plan(tuple(Bucket((tensor,)) for tensor in order))
        ready = {tensor.name: time_s for tensor, time_s in zip(tensors, timing.ready_s, strict=True)}
        buckets: list[Bucket] = []
        for kind in one_bucket_per_kind(tensors):
            buckets += _best_cut(kind.tensors, [ready[tensor.name] for tensor in kind.tensors], timing)
        # Kinds share the link: in the order in which their last gradients are there.
        buckets.sort(key=lambda bucket: ready[bucket.tensors[-1].name])
        return Plan(tuple(buckets))


def _best_cut(tensors: Sequence[TensorSpec], ready_s: Sequence[float], timing: Timing) -> list[Bucket]:
    sizes = np.cumsum([0, *(tensor.nbytes for tensor in tensors)])
    ends = np.zeros(len(tensors) + 1)
    before = [0] * (len(tensors) + 1)
    for last in range(1, len(tensors) + 1):
        begins = np.maximum(ends[:last], ready_s[last - 1])
        options = begins + timing.startup_s + timing.byte_s * (sizes[last] - sizes[:last])
        # Of equally good ones the first, which has the fewest buckets.
        before[last] = int(options.argmin())
        ends[last] = options[before[last]]
    cuts: list[Bucket] = []
    last = len(tensors)
    while last:
        cuts.append(Bucket(tuple(tensors[before[last] : last])))
        last = before[last]
    return cuts[::-1]


def predicted_end_s(plan: Plan, ready_s: dict[str, float], timing: Timing) -> float:
    """When the last exchange of a plan ends if exchanges follow one another on one link."""
    end_s = 0.0
    for bucket in plan.buckets:
        ready = max(ready_s[tensor.owner] for tensor in bucket.tensors)
        end_s = max(end_s, ready) + timing.exchange_s(bucket.nbytes)
    return end_s
