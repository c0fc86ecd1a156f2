"""What a schedule decides: which tensors travel together, in which order, and when each group may leave.

The runtime executes a Plan and the simulator prices the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from laconic.core.tensor import TensorSpec


@dataclass(frozen=True)
class Bucket:
    """Tensors, or pieces of them, of one dtype on one device that travel as one flat tensor, in this order."""

    tensors: tuple[TensorSpec, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of all its tensors."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The one device of all its tensors."""
        return self.tensors[0].device

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor, uncompressed."""
        return self.numel * self.dtype.itemsize

    def segments(self) -> list[tuple[TensorSpec, slice]]:
        """Each tensor with its place in the flat tensor."""
        ends = list(accumulate(tensor.numel for tensor in self.tensors))
        return [(tensor, slice(end - tensor.numel, end)) for tensor, end in zip(self.tensors, ends, strict=True)]


Launch = Literal["ready", "after_backward"]


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which every rank exchanges them.

    launch = "ready": a bucket leaves as soon as all its gradients are there and its predecessors have left.
    launch = "after_backward": nothing leaves before the backward pass has ended.
    """

    buckets: tuple[Bucket, ...]
    launch: Launch = "ready"
    deferred: bool = False
    """The outcome is needed only when a layer is about to be used again, not when the backward pass has ended."""
    halves: bool = False
    """Sums are formed in two halves: each rank gets its share of the sum when the bucket is exchanged, and all get the
    rest after the backward pass, last bucket first."""
    credit_bytes: int = 0
    """Bytes that may be under way at a time; 0: a few buckets, whatever their size."""
    layout: tuple[str, ...] = ()
    """The order of tensors in memory; buckets are runs of it. Empty: as they come in the buckets."""
    weights: tuple[Bucket, ...] = ()
    """Where each rank holds a shard of every parameter: those that are put together at one time, in forward order."""
