"""A bucket cut into blocks whose lengths are powers of two; kernels/rotation.py rotates each.

Every parameter is cut into blocks of the given length and, at its end, into ever shorter ones, so that nothing has to
be padded and nothing depends on how parameters were grouped into buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.compression.wire.cuts import Cuts
from laconic.core.stateful import BucketState


class Blocks(NamedTuple):
    """All blocks of one length."""

    length: int
    numbers: torch.Tensor
    """Their numbers among all blocks."""
    aligned: bool
    """Whether every one begins at a multiple of sixteen values."""


@dataclass(frozen=True)
class Rotation(Cuts):
    """The blocks of one bucket, in order."""

    block: int
    """The length of the longest blocks; it is rounded down to a power of two."""

    @property
    def longest(self) -> int:
        """The power of two."""
        return 1 << (self.block.bit_length() - 1)

    def cut(self, numel: int) -> NDArray[np.int64]:
        """After each of the longest blocks, then after each power of two in the rest."""
        cuts = [np.arange(0, numel - numel % self.longest, self.longest, dtype=np.int64)]
        start, length = numel - numel % self.longest, self.longest
        while start < numel:
            length //= 2
            if numel - start >= length:
                cuts.append(np.array([start], dtype=np.int64))
                start += length
        return np.concatenate(cuts)

    @cached_property
    def num_chunks(self) -> int:
        """The number of blocks, without computing where they begin: one for each power of two in a rest."""
        numels = [tensor.numel for tensor in self.bucket.tensors]
        return sum(numel // self.longest + (numel % self.longest).bit_count() for numel in numels)

    @cached_property
    def by_length(self) -> list[Blocks]:
        """The blocks of each length."""
        lengths, found = np.diff(self.starts), list[Blocks]()
        for length in np.unique(lengths):
            blocks = np.flatnonzero(lengths == length)
            aligned = not (self.starts[blocks] % 16).any()
            found.append(Blocks(int(length), torch.from_numpy(blocks).to(self.bucket.device), aligned))
        return found


def rotation_of(state: BucketState, block: int) -> Rotation:
    """The blocks of a state's bucket, computed once."""
    key = ("rotation", block)
    if key not in state.tables:
        state.tables[key] = Rotation(state.bucket, block)
    found: Rotation = state.tables[key]
    return found
