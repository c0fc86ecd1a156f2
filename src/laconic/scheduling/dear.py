"""Half of each sum during the backward pass, the other half during the next forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.plan import Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.scheduling.contract import FIRST_BYTES, LATER_BYTES, Schedule, filled, one_bucket_per_kind, partitions
from laconic.settings import size
from laconic.units import MIB

_TRIED = (LATER_BYTES, 4 * MIB, 1 * MIB)


@dataclass(frozen=True, kw_only=True)
class Dear(Schedule):
    """Split each all-reduce: reduce-scatter while gradients are computed, all-gather while the next forward pass runs.

        backward: reduce-scatter of buckets, last layers first      next forward: all-gather, first layers first

    Each half moves (n-1)/n N bytes, so training waits for the link only if it is busy for longer than a step computes.
    Splitting costs processor time, which training lacks where hosts are busy and links are fast. So with bytes=0 a few
    bucket sizes and unsplit all-reduces, as `fusion` sends them, are tried in the first steps, and what has the
    shortest steps is kept.

    Reference: Zhang et al. 2023, arXiv:2302.12445.
    """

    name: ClassVar[str] = "dear"
    defers: ClassVar[bool] = True
    decoupled: ClassVar[bool] = True
    cuts_tensors: ClassVar[bool] = True
    candidates: ClassVar[int] = len(_TRIED) + 1
    settles_after: ClassVar[int] = 1 + 6 * candidates

    bytes: int = size(0, at_least=0)
    """A bucket is sent once it holds this much; 0: found by trying, and sums are split only where this is faster.

    Larger tensors are cut into pieces of this size, or of 1 MiB, because the second half of a sum cannot begin before
    the first is complete."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bytes:
            # It depends on a setting, so it is a property of the object, not of the class.
            object.__setattr__(self, "candidates", 1)
            object.__setattr__(self, "settles_after", 2)

    def plan(
        self, tensors: Sequence[TensorSpec], *, observed: bool, timing: Timing | None = None, candidate: int = 0
    ) -> Plan:
        """Buckets in the order in which they fill up; their second halves follow in the opposite order.

        The last candidate does not split sums.
        """
        if not observed:
            return Plan(one_bucket_per_kind(tensors))
        if candidate == len(_TRIED):
            return Plan(filled(tensors, FIRST_BYTES, LATER_BYTES))
        limit = self.bytes or _TRIED[candidate]
        layout = tuple(tensor.name for tensor in tensors)
        return Plan(
            tuple(partitions(tensors, max(limit, MIB), merged_bytes=limit)),
            deferred=True,
            decoupled=True,
            layout=layout,
        )
