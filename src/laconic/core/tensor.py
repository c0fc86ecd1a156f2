"""What is known about a tensor without having its values."""

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
    """Tensors in which this is the same get their gradients at one moment; empty: each by itself."""
    gathers: int = 2
    """Where shards are put together for each pass: how often a step does so. 1: it stays whole between the passes."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """The spec of an existing tensor."""
        return cls(name, tuple(tensor.shape), tensor.dtype, tensor.device)

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

    def shard(self, index: int, count: int) -> TensorSpec:
        """What rank `index` of `count` holds of it where the first dimension is cut into chunks of one length.

        So FSDP2 does it: the last chunks are shorter, or empty.
        """
        if not self.shape:
            raise ValueError(f"{self.name} is a scalar, of which nothing can be cut off")
        length = -(-self.shape[0] // count)
        rows = max(0, min(length, self.shape[0] - index * length))
        return replace(self, shape=(rows, *self.shape[1:]), whole_bytes=self.nbytes)

    def piece(self, begin: int, end: int) -> TensorSpec:
        """Elements `begin` to `end` of it; itself if that is all."""
        if begin == 0 and end == self.numel:
            return self
        first = self.start + begin
        name = f"{self.owner}[{first}:{first + end - begin}]"
        return replace(self, name=name, shape=(end - begin,), part_of=self.owner, start=first, whole_bytes=0)

    def shard_piece(self, index: int, count: int) -> TensorSpec:
        """The elements that rank `index` of `count` holds of it, as `shard` says, as a piece."""
        rest = math.prod(self.shape[1:])
        length = -(-self.shape[0] // count)
        begin, end = (min(row * length, self.shape[0]) * rest for row in (index, index + 1))
        return self.piece(begin, end)
