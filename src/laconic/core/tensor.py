"""What is known about a tensor without having its values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape, dtype and device of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

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
