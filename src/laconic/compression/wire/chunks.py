"""A bucket cut into chunks: values that share a scale.

Every parameter is cut into chunks of at most `block` elements, so no chunk holds values of two parameters and nothing
depends on how parameters were grouped into buckets. A packed bucket is

    scales   float32, `num_scales` per chunk, chunk after chunk
    codes    `bits` per element, packed from the lowest bit up; every chunk starts at a byte of its own
    padding  zeros up to a multiple of 4 bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.compression.wire.cuts import Cuts
from laconic.core.stateful import BucketState


@dataclass(frozen=True)
class Chunks(Cuts):
    """Chunks of equal lengths, except for the last ones of parameters, and their places in the packed bytes."""

    block: int
    bits: int
    num_scales: int

    @property
    def longest(self) -> int:
        """A whole block."""
        return self.block

    def cut(self, numel: int) -> NDArray[np.int64]:
        """After each block."""
        return np.arange(0, numel, self.block, dtype=np.int64)

    @cached_property
    def code_starts(self) -> NDArray[np.int64]:
        """The first byte of each chunk's codes, counted from the first code; one entry more at the end."""
        sizes = (np.diff(self.starts) * self.bits + 7) // 8
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def num_chunks(self) -> int:
        """The number of chunks, without computing where they begin."""
        return sum(-(-tensor.numel // self.block) for tensor in self.bucket.tensors)

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of all codes: the last entry of `code_starts`, without computing the others."""
        whole, total = (self.block * self.bits + 7) // 8, 0
        for tensor in self.bucket.tensors:
            full, rest = divmod(tensor.numel, self.block)
            total += full * whole + (rest * self.bits + 7) // 8
        return total

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes before the first code."""
        return 4 * self.num_scales * self.num_chunks

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of the whole payload."""
        return -(-(self.scale_bytes + self.code_bytes) // 4) * 4

    @cached_property
    def code_starts_tensor(self) -> torch.Tensor:
        """`code_starts` on the bucket's device."""
        return torch.from_numpy(self.code_starts).to(self.bucket.device)


def chunks_of(state: BucketState, *, block: int, bits: int, num_scales: int) -> Chunks:
    """The chunks of a state's bucket, computed once."""
    key = ("chunks", block, bits, num_scales)
    if key not in state.tables:
        state.tables[key] = Chunks(state.bucket, block, bits, num_scales)
    found: Chunks = state.tables[key]
    return found
