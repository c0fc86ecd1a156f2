"""The description of a tensor without its values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape, dtype and device of one tensor, or of a run of elements of one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    part_of: str = ""
    """The tensor this is a piece of; empty if it is whole."""
    start: int = 0
    """Where the piece begins in it."""
    whole_bytes: int = 0
    """Where each rank of a group holds a shard: bytes of all shards together; 0 if it is not sharded."""
    ready_with: str = ""
    """Tensors with the same value here get their gradients at the same time; empty: each by itself."""
    gathers: int = 2
    """Where shards are gathered for each pass: gathers per step. 1: it stays unsharded between the passes."""
    moment: str = ""
    """For a tensor of the optimizer's state: its name there, such as exp_avg. Empty for a parameter and its
    gradient."""
    outermost: int = 0
    """The dimension whose slices follow one another in memory, as in a bucket; not the first if the tensor is stored
    transposed."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """The spec of an existing tensor."""
        return cls(name, tuple(tensor.shape), tensor.dtype, tensor.device, outermost=outermost_dimension(tensor))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the plain tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def owner(self) -> str:
        """The name of the whole tensor."""
        return self.part_of or self.name

    def moment_of(self, moment: str) -> TensorSpec:
        """The optimizer's state of this parameter under a name."""
        return replace(self, name=f"{moment} of {self.name}", moment=moment)

    def shard(self, index: int, count: int) -> TensorSpec:
        """The shard of rank `index` of `count` where the first dimension is cut into chunks of one length.

        As in FSDP2, the last chunks are shorter, or empty.
        """
        if not self.shape:
            raise ValueError(f"{self.name} is a scalar, which cannot be cut")
        length = -(-self.shape[0] // count)
        rows = max(0, min(length, self.shape[0] - index * length))
        return replace(self, shape=(rows, *self.shape[1:]), whole_bytes=self.nbytes)

    def piece(self, begin: int, end: int) -> TensorSpec:
        """Elements `begin` to `end` of this tensor; the tensor itself if these are all."""
        if begin == 0 and end == self.numel:
            return self
        first = self.start + begin
        name = f"{self.owner}[{first}:{first + end - begin}]"
        # Written out: many thousand pieces are cut for many ranks, and replace() takes several times as long.
        return TensorSpec(
            name,
            (end - begin,),
            self.dtype,
            self.device,
            part_of=self.owner,
            start=first,
            ready_with=self.ready_with,
            gathers=self.gathers,
            moment=self.moment,
        )

    def shard_piece(self, index: int, count: int) -> TensorSpec:
        """The elements of this tensor that rank `index` of `count` holds, cut as in `shard`, as a piece."""
        rows, rest = self.shape[0], math.prod(self.shape[1:])
        length = -(-rows // count)
        return self.piece(min(index * length, rows) * rest, min((index + 1) * length, rows) * rest)


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions of a dense tensor as it lies in memory, outermost first; None if it has gaps or overlaps."""
    # A dense tensor's strides are a permutation of a contiguous tensor's: sorted by stride it is contiguous.
    order = sorted(range(tensor.dim()), key=lambda axis: (tensor.stride(axis), tensor.shape[axis]), reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def outermost_dimension(tensor: torch.Tensor) -> int:
    """`TensorSpec.outermost` of an existing tensor; a bucket holds one with gaps as if it were contiguous."""
    return 0 if tensor.is_contiguous() else next(iter(memory_order(tensor) or ()), 0)
