"""A bucket cut into chunks, none of which holds values of two parameters, each with random numbers of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.compression.wire.seeds import base_seed, mix_tensor, uniform
from laconic.core.plan import Bucket


@dataclass(frozen=True)
class Cuts:
    """Positions of the chunks of one bucket in the flat tensor; a subclass says where a parameter is cut."""

    bucket: Bucket

    @property
    def longest(self) -> int:
        """The most elements that a chunk can have."""
        raise NotImplementedError

    def cut(self, numel: int) -> NDArray[np.int64]:
        """The first element of each chunk of a parameter with so many elements."""
        raise NotImplementedError

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first element of each chunk; one entry more at the end."""
        cuts = [place.start + self.cut(tensor.numel) for tensor, place in self.bucket.segments()]
        return np.concatenate([*cuts, [self.bucket.numel]]).astype(np.int64)

    @cached_property
    def seeds(self) -> NDArray[np.int64]:
        """The base seed of each chunk."""
        return np.array(
            [
                base_seed(tensor.name, position)
                for tensor in self.bucket.tensors
                for position in self.cut(tensor.numel).tolist()
            ],
            dtype=np.int64,
        )

    @cached_property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return len(self.starts) - 1

    @cached_property
    def alignment(self) -> int:
        """The largest power of two, up to 16, such that every chunk begins and ends at a multiple of so many values."""
        return math.gcd(int(np.gcd.reduce(self.starts)), 16)

    @property
    def aligned(self) -> bool:
        """Whether every chunk begins and ends at a multiple of sixteen values."""
        return self.alignment == 16

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Elements of each chunk, on the bucket's device."""
        return torch.from_numpy(np.diff(self.starts)).to(self.bucket.device)

    @cached_property
    def starts_tensor(self) -> torch.Tensor:
        """`starts` on the bucket's device."""
        return torch.from_numpy(self.starts).to(self.bucket.device)

    @cached_property
    def seeds_tensor(self) -> torch.Tensor:
        """`seeds` on the bucket's device."""
        return torch.from_numpy(self.seeds).to(self.bucket.device)

    def chunk_of_element(self) -> torch.Tensor:
        """The chunk of every element: for references, not for kernels."""
        return torch.repeat_interleave(torch.arange(self.num_chunks, device=self.bucket.device), self.lengths)

    def numbers(self, moment_seed: int) -> torch.Tensor:
        """A random number of 32 bits for every element: for references, not for kernels."""
        chunk = self.chunk_of_element()
        position = torch.arange(self.bucket.numel, device=self.bucket.device) - self.starts_tensor[chunk]
        return mix_tensor(position + mix_tensor(self.seeds_tensor ^ moment_seed)[chunk])

    def random(self, moment_seed: int) -> torch.Tensor:
        """A number in [0, 1) for every element: for references, not for kernels."""
        return uniform(self.numbers(moment_seed))
