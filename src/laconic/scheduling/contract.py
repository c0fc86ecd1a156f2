"""The contract of a schedule: the same Plan on every rank, from the same list of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.core.plan import Bucket, Plan
from laconic.core.tensor import TensorSpec
from laconic.core.timing import Timing
from laconic.settings import Method
from laconic.units import MIB

FIRST_BYTES, LATER_BYTES = 1 * MIB, 25 * MIB
"""The limits of the first bucket and of later ones in torch's DDP."""
_EVEN = 256
"""The elements of a piece are rounded up to a multiple of this where possible."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Method):
    """IN WHAT ORDER tensors are exchanged, overlapped with what."""

    axis: ClassVar[str] = "scheduling"
    needs_timing: ClassVar[bool] = False
    """Uses measured times."""
    defers: ClassVar[bool] = False
    """Defers updates to the next use of a layer; for gradients that all ranks average."""
    decoupled: ClassVar[bool] = False
    """Splits an all-reduce into a reduce-scatter and an all-gather that may wait."""
    cuts_tensors: ClassVar[bool] = False
    """Sends tensors in pieces."""
    settles_after: ClassVar[int] = 2
    """Passes after which its plan usually no longer changes."""
    candidates: ClassVar[int] = 1
    """The number of plans it can make of the same tensors, of which the best is found by trying."""

    @property
    def bucket_limits(self) -> tuple[int, int] | None:
        """Bytes at which its first bucket and the later ones are sent, if it forms buckets as torch's DDP does.

        None: it forms other buckets.
        """
        return None

    def plan(
        self, tensors: Sequence[TensorSpec], *, observed: bool, timing: Timing | None = None, candidate: int = 0
    ) -> Plan:
        """Group and order `tensors`.

        Before the first backward pass (`observed` is False) they come in the order of registration; afterwards in
        the order in which rank 0 saw their gradients become ready, and after a few passes with `timing`. All ranks pass
        the same arguments.
        """
        raise NotImplementedError

    def lasting_plan(self, tensors: Sequence[TensorSpec]) -> Plan | None:
        """The permanent plan where any pass may leave parameters unused; None: plans follow the observed order.

        `tensors` come in the order of registration.
        """
        return None


def one_bucket_per_kind(tensors: Sequence[TensorSpec]) -> tuple[Bucket, ...]:
    """As few buckets as dtypes and devices allow, tensors in the order given."""
    kinds: dict[object, list[TensorSpec]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return tuple(Bucket(tuple(group)) for group in kinds.values())


def filled(tensors: Sequence[TensorSpec], first_bytes: int, later_bytes: int) -> tuple[Bucket, ...]:
    """Buckets as torch's DDP forms them: each is closed by the tensor that makes its size reach the limit.

    Limits hold per dtype and device, the first one for the first bucket of each. Of a model sharded by FSDP, buckets
    also end with each part whose gradients arrive together. Unfinished buckets come last.
    """
    closed: list[Bucket] = []
    open_buckets: dict[object, list[TensorSpec]] = {}
    limits: dict[object, int] = {}
    held: dict[object, int] = {}
    ready_with = ""
    for tensor in tensors:
        if tensor.ready_with != ready_with:
            # Those before are all there now: a bucket that went on would wait for those that follow.
            closed += [Bucket(tuple(members)) for members in open_buckets.values()]
            limits |= dict.fromkeys(open_buckets, later_bytes)
            open_buckets, held, ready_with = {}, {}, tensor.ready_with
        kind = (tensor.dtype, tensor.device)
        members = open_buckets.setdefault(kind, [])
        members.append(tensor)
        held[kind] = held.get(kind, 0) + tensor.nbytes
        if held[kind] >= limits.get(kind, first_bytes):
            closed.append(Bucket(tuple(open_buckets.pop(kind))))
            limits[kind] = later_bytes
            held[kind] = 0
    closed += [Bucket(tuple(members)) for members in open_buckets.values()]
    return tuple(closed)


def partitions(tensors: Sequence[TensorSpec], nbytes: int, *, merged_bytes: int) -> list[Bucket]:
    """Tensors in equal pieces of at most `nbytes`, and smaller adjacent ones merged until they have `merged_bytes`.

    Adjacent small tensors before a tensor that is cut are sent with its first piece. With merged_bytes = 0 every tensor
    is sent by itself.
    """
    found: list[Bucket] = []
    waiting: dict[object, list[TensorSpec]] = {}
    filled: dict[object, int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        first, *others = _pieces(tensor, nbytes)
        waiting.setdefault(kind, []).append(first)
        filled[kind] = filled.get(kind, 0) + first.nbytes
        if others or filled[kind] >= merged_bytes:
            found.append(Bucket(tuple(waiting.pop(kind))))
            filled[kind] = 0
        found += [Bucket((piece,)) for piece in others]
    return found + [Bucket(tuple(run)) for run in waiting.values()]


def _pieces(tensor: TensorSpec, nbytes: int) -> list[TensorSpec]:
    most = max(1, nbytes // tensor.dtype.itemsize)
    if tensor.numel <= most:
        return [tensor]
    # Rounded where possible, so that ranks can share a piece without padding.
    step = -(-tensor.numel // -(-tensor.numel // most))
    step = min(most, -(-step // _EVEN) * _EVEN)
    return [tensor.piece(begin, min(begin + step, tensor.numel)) for begin in range(0, tensor.numel, step)]
