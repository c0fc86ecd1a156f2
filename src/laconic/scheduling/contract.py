"""What a schedule promises: the same Plan on every rank, from the same list of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.settings import Method


@dataclass(frozen=True, kw_only=True)
class Schedule(Method):
    """IN WHAT ORDER tensors are exchanged, overlapped with what."""

    axis: ClassVar[str] = "scheduling"
    needs_timing: ClassVar[bool] = False
    """Plans better when it knows how long things take."""
    defers: ClassVar[bool] = False
    """Lets the outcome come as late as the next use of a layer; for gradients that everyone averages."""
    halves: ClassVar[bool] = False
    """Forms sums in two halves."""
    cuts_tensors: ClassVar[bool] = False
    """Sends tensors in pieces."""
    settles_after: ClassVar[int] = 2
    """Passes after which its plan usually stays as it is."""
    candidates: ClassVar[int] = 1
    """Plans it can make of the same tensors; which is best is tried out."""

    def plan(
        self, tensors: Sequence[TensorSpec], *, observed: bool, timing: Timing | None = None, candidate: int = 0
    ) -> Plan:
        """Group and order `tensors`.

        Before the first backward pass (`observed` is False) they come in the order of registration; afterwards in
        the order in which rank 0 saw their gradients become ready, and after a few passes with `timing`. All ranks pass
        the same arguments.
        """
        raise NotImplementedError


def one_bucket_per_kind(tensors: Sequence[TensorSpec]) -> tuple[Bucket, ...]:
    """As few buckets as dtypes and devices allow, tensors in the order given."""
    kinds: dict[object, list[TensorSpec]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return tuple(Bucket(tuple(group)) for group in kinds.values())


def partitions(tensors: Sequence[TensorSpec], nbytes: int, *, cut: bool, merge: bool = True) -> list[Bucket]:
    """Runs of at least `nbytes`, the last of each dtype and device excepted; without `merge`, every tensor by itself.

    With `cut`, tensors larger than that are cut into pieces of at most `nbytes`.
    """
    found: list[Bucket] = []
    open_runs: dict[object, list[TensorSpec]] = {}
    filled: dict[object, int] = {}

    def close(kind: object) -> None:
        filled.pop(kind, None)
        if run := open_runs.pop(kind, None):
            found.append(Bucket(tuple(run)))

    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if cut and tensor.nbytes > nbytes:
            close(kind)
            step = max(1, nbytes // tensor.dtype.itemsize)
            begins = range(0, tensor.numel, step)
            found += [Bucket((tensor.piece(begin, min(begin + step, tensor.numel)),)) for begin in begins]
            continue
        open_runs.setdefault(kind, []).append(tensor)
        filled[kind] = filled.get(kind, 0) + tensor.nbytes
        if filled[kind] >= nbytes or not merge:
            close(kind)
    for kind in list(open_runs):
        close(kind)
    return found
