"""The decision of a schedule: the tensors of each bucket, the order of buckets, and when each may be launched.

The runtime executes a Plan, and the simulator predicts the cost of the same object.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch

from laconic.core.tensor import TensorSpec


@dataclass(frozen=True)
class Bucket:
    """Tensors, or pieces of them, of one dtype on one device that are exchanged as one flat tensor, in this order."""

    tensors: tuple[TensorSpec, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of all its tensors."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The one device of all its tensors."""
        return self.tensors[0].device

    @cached_property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor, uncompressed."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def wide(self) -> Bucket:
        """The same tensors in float32, or in their own dtype where that has more digits."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        if dtype == self.dtype:
            return self
        return Bucket(tuple(replace(tensor, dtype=dtype) for tensor in self.tensors))

    @property
    def moment(self) -> str:
        """The one name that all its tensors have in the optimizer's state; empty for parameters and gradients."""
        return self.tensors[0].moment

    @cached_property
    def layout(self) -> tuple[object, ...]:
        """The properties that its wire bytes depend on, unless a compressor selects by name."""
        return tuple((tensor.shape, tensor.dtype, tensor.moment, tensor.whole_bytes) for tensor in self.tensors)

    def segments(self) -> list[tuple[TensorSpec, slice]]:
        """Each tensor with its place in the flat tensor."""
        ends = list(accumulate(tensor.numel for tensor in self.tensors))
        return [(tensor, slice(end - tensor.numel, end)) for tensor, end in zip(self.tensors, ends, strict=True)]


Launch = Literal["ready", "after_backward"]


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which every rank exchanges them.

    launch = "ready": a bucket is launched as soon as all its gradients are ready and its predecessors are launched.
    launch = "after_backward": no bucket is launched before the backward pass has ended.
    """

    buckets: tuple[Bucket, ...]
    launch: Launch = "ready"
    deferred: bool = False
    """Whether updates are deferred: results are needed when a layer is used next, not at the end of the backward
    pass."""
    decoupled: bool = False
    """Sums are decoupled: a reduce-scatter when the bucket is exchanged, and an all-gather after the backward pass,
    last bucket first."""
    credit_bytes: int = 0
    """Bytes that may be in flight at a time; 0: a few buckets, whatever their size."""
    layout: tuple[str, ...] = ()
    """The order of tensors in memory; buckets are ranges of it. Empty: the order of the buckets."""
    weights: tuple[Bucket, ...] = ()
    """Where each rank holds a shard of every parameter: those that are gathered together, in forward order."""
