"""Pieces of tensors, front layers first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.scheduling.contract import Schedule, one_bucket_per_kind, partitions
from laconic.settings import flag, size
from laconic.units import MIB

_LINK_HAS_TIME = 2.0
"""Backward passes that sending everything may take; a step with the next forward pass takes about one and a half."""


@dataclass(frozen=True, kw_only=True)
class Priority(Schedule):
    """Cut tensors into pieces and send those of front layers first; the next forward pass waits layer by layer.

    Gradients become ready from the last layer to the first, but the first is needed first. So of the pieces that are
    ready, the one nearest to the front is sent next, and pieces left when the backward pass has ended are sent during
    the next forward pass. The order is planned from measured times and equal on all ranks: they need not negotiate it.

    Reference: Jayarajan et al. 2019 (P3), arXiv:1905.03960; Peng et al. 2019 (ByteScheduler), SOSP.
    """

    name: ClassVar[str] = "priority"
    needs_timing: ClassVar[bool] = True
    settles_after: ClassVar[int] = 5
    defers: ClassVar[bool] = True
    cuts_tensors: ClassVar[bool] = True

    partition_bytes: int = size(2 * MIB, at_least=1024)
    """Larger tensors are cut into pieces of at most this size."""
    merge: bool = flag(True)
    """Whether smaller neighbours are merged up to a quarter of that size; if not, every tensor has a start-up
    cost of its own, as in P3 and ByteScheduler."""
    credit_bytes: int = size(0, at_least=0)
    """Bytes in flight: more hides start-up costs, less lets urgent pieces go sooner. 0: two pieces."""

    def plan(
        self, tensors: Sequence[TensorSpec], *, observed: bool, timing: Timing | None = None, candidate: int = 0
    ) -> Plan:
        """Pieces in the order in which they should leave."""
        if not observed:
            return Plan(one_bucket_per_kind(tensors))
        # What is cut where must not depend on times: what compressors make of it, and rounding, would as well.
        pieces = partitions(tensors, self.partition_bytes, merged_bytes=self.partition_bytes // 4 if self.merge else 0)
        if pieces and timing is not None:
            ready = {tensor.name: time_s for tensor, time_s in zip(tensors, timing.ready_s, strict=True)}
            pieces = _front_first(pieces, ready, timing)
        layout = tuple(tensor.name for tensor in tensors)
        credit_bytes = self.credit_bytes or 2 * self.partition_bytes
        return Plan(tuple(pieces), deferred=True, credit_bytes=credit_bytes, layout=layout)


def _front_first(pieces: list[Bucket], ready_s: dict[str, float], timing: Timing) -> list[Bucket]:
    """The order in which the link sends pieces: of those ready, the one that became ready last, nearest to the front.

    A piece that would still be in flight when the first layers' gradients are ready is sent after those, which the next
    forward pass needs at once - unless the link has so much to send that it must not be idle.
    """
    waiting = [
        (max(ready_s[tensor.owner] for tensor in piece.tensors), number, piece) for number, piece in enumerate(pieces)
    ]
    waiting.sort(key=lambda entry: entry[:2])
    complete_s = waiting[-1][0]
    has_time = timing.byte_s * sum(piece.nbytes for piece in pieces) < _LINK_HAS_TIME * complete_s
    there: list[tuple[float, int, Bucket]] = []
    order: list[Bucket] = []
    now_s, coming = 0.0, 0
    while len(order) < len(pieces):
        if not there and coming < len(waiting):
            now_s = max(now_s, waiting[coming][0])
        while coming < len(waiting) and waiting[coming][0] <= now_s:
            time_s, number, piece = waiting[coming]
            heapq.heappush(there, (-time_s, number, piece))
            coming += 1
        took_s = timing.byte_s * there[0][2].nbytes  # start-up costs are hidden by the next one in flight
        if has_time and now_s < complete_s < now_s + took_s:
            now_s = complete_s
            continue
        order.append(heapq.heappop(there)[2])
        now_s += took_s
    return order
