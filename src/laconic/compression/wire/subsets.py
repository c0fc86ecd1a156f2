"""Which k entries of each chunk are meant, as one number per chunk in the fewest bits.

Ascending positions p_1 < ... < p_k have the number C(p_1, 1) + ... + C(p_k, k), which counts all k-subsets from 0 on
(the combinatorial number system). A number has ceil(log2 C(length, k)) bits: 16 for 3 of 64, where positions take 18.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from laconic.compression.kernels.topk import topk_of_rows
from laconic.compression.wire.bits import numbers_of, write_numbers
from laconic.compression.wire.entries import joined, num_kept, rows_of_chunks
from laconic.core.plan import Bucket

LONGEST_CHUNK = 64
"""The number of any subset of so many fits in 64 bits."""


def number_of(positions: torch.Tensor, length: int) -> torch.Tensor:
    """The numbers of the subsets in the rows of `positions`, which ascend and are less than `length`."""
    table = _counts(length, positions.shape[1], positions.device)
    return table.gather(1, positions.T).sum(0)


def positions_of(numbers: torch.Tensor, length: int, kept: int) -> torch.Tensor:
    """The subsets with these numbers, one per row, in ascending order."""
    found = torch.empty((numbers.numel(), kept), dtype=torch.int64, device=numbers.device)
    rest = numbers.clone()
    for column, counts in reversed(list(enumerate(_counts(length, kept, numbers.device)))):
        # The largest position whose count is not more than the rest.
        found[:, column] = torch.searchsorted(counts, rest, right=True) - 1
        rest -= counts[found[:, column]]
    return found


@cache
def _counts(length: int, kept: int, device: torch.device) -> torch.Tensor:
    """C(p, i) for i = 1 ... `kept`, one row each, and p = 0 ... `length` - 1."""
    rows = [[math.comb(position, size) for position in range(length)] for size in range(1, kept + 1)]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(kept, length)


@dataclass(frozen=True)
class SubsetsOfChunks:
    """The same number of entries of every chunk of a bucket."""

    bucket: Bucket
    chunk: int
    density: float

    @cached_property
    def _kinds(self) -> list[tuple[int, int, int, slice]]:
        """Adjacent chunks of one length: how many, their length, the entries of each, and their position."""
        found = joined(rows_of_chunks(self.bucket, self.chunk))
        return [(count, length, num_kept(self.density, length), place) for (count, length), place in found]

    @cached_property
    def _bits(self) -> int:
        return max(((math.comb(length, kept) - 1).bit_length() for _, length, kept, _ in self._kinds), default=0)

    @cached_property
    def _chunks_of_tensors(self) -> list[int]:
        return [-(-tensor.numel // self.chunk) for tensor in self.bucket.tensors]

    def share(self, num_parts: int) -> int:
        """The most chunks in a part, if every `num_parts`-th chunk of each tensor is in the same part."""
        return sum(-(-count // num_parts) for count in self._chunks_of_tensors)

    def packed_bytes(self, num_parts: int) -> int:
        """The bytes of one of so many parts; a multiple of 4."""
        return -(-self.share(num_parts) * self._bits // 32) * 4

    def places(self, num_parts: int) -> torch.Tensor:
        """The place of each chunk among the numbers of all parts, each of which has room for `share` numbers."""
        share, found, before = self.share(num_parts), [torch.empty(0, dtype=torch.int64)], 0
        for count in self._chunks_of_tensors:
            inside = torch.arange(count)
            found.append(inside % num_parts * share + before + inside // num_parts)
            before += -(-count // num_parts)
        return torch.cat(found)

    def largest(self, flat: torch.Tensor, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The numbers of the subsets with the largest magnitudes, for some chunks of each kind (`by_kind`)."""
        found = [torch.empty(0, dtype=torch.int64, device=flat.device)]
        for (count, length, kept, place), chosen in zip(self._kinds, chunks, strict=True):
            if chosen.numel():
                found.append(number_of(topk_of_rows(flat[place].view(count, length)[chosen], kept), length))
        return torch.cat(found)

    def by_kind(self, chunks: torch.Tensor) -> list[torch.Tensor]:
        """Ascending numbers of chunks, divided among the adjacent chunks of one length and counted from their first."""
        found, before = [], 0
        for count, _, _, _ in self._kinds:
            found.append(chunks[(chunks >= before) & (chunks < before + count)] - before)
            before += count
        return found

    def pack(self, numbers: torch.Tensor, num_parts: int) -> torch.Tensor:
        """The bytes of one of so many parts."""
        packed = torch.zeros(self.packed_bytes(num_parts), dtype=torch.uint8, device=numbers.device)
        write_numbers(numbers, self._bits, packed)
        return packed

    def unpack(self, parts: torch.Tensor) -> torch.Tensor:
        """The numbers in all parts, one part per row."""
        return numbers_of(parts, self._bits, self.share(len(parts)), torch.int64)

    def indices(self, numbers: torch.Tensor) -> torch.Tensor:
        """Positions in the flat tensor, in ascending order, for the numbers of all chunks."""
        found = [torch.empty(0, dtype=torch.int64, device=numbers.device)]
        before = 0
        for count, length, kept, place in self._kinds:
            begins = torch.arange(place.start, place.stop, length, device=numbers.device)
            positions = positions_of(numbers[before : before + count], length, kept)
            found.append((positions + begins.unsqueeze(1)).view(-1))
            before += count
        return torch.cat(found)
