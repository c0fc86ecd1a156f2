"""A few entries of each tensor: where they are, then what they are.

A packed bucket is the coded indices of all its entries (wire/indices.py), then their values as float32. Where every
chunk of a tensor has as many entries, an index says where in its chunk an entry is, in as few bits as that takes.
Entries are chosen tensor by tensor, so what is sent of a parameter does not depend on the bucket it travels in. Values
of float64 tensors are rounded to float32, and those beyond its range become infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from laconic.compression.kernels.topk import topk_indices
from laconic.compression.wire.bits import bits_of, write_bits
from laconic.compression.wire.indices import decode_indices, encode_indices, indices_bytes
from laconic.core.plan import Bucket


def num_kept(density: float, numel: int) -> int:
    """How many entries of a tensor that share is, rounded up: at least one if it has any."""
    return min(numel, math.ceil(density * numel))


@dataclass(frozen=True)
class Entries:
    """A fixed number of entries of each tensor of a bucket, and how they are packed."""

    bucket: Bucket
    counts: tuple[int, ...]
    coding: str

    @cached_property
    def numel(self) -> int:
        """Entries they are chosen from."""
        return self.bucket.numel

    @cached_property
    def num_values(self) -> int:
        """Entries of all tensors together."""
        return sum(self.counts)

    @property
    def indices_bytes(self) -> int:
        """Bytes before the first value."""
        return indices_bytes(self.numel, self.num_values, self.coding)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the whole."""
        return self.indices_bytes + 4 * self.num_values

    def largest(self, flat: torch.Tensor) -> torch.Tensor:
        """Where the largest magnitudes of each tensor are in the flat tensor, in ascending order."""
        return torch.cat(
            [
                topk_indices(flat[place], count) + place.start
                for (_, place), count in zip(self.bucket.segments(), self.counts, strict=True)
            ]
        )

    def encode(self, indices: torch.Tensor) -> torch.Tensor:
        """Ascending indices as `indices_bytes` bytes."""
        return encode_indices(indices, self.numel, self.coding)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """The indices again, from exactly so many bytes."""
        return decode_indices(packed, self.numel, self.num_values, self.coding)

    def pack(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Entries as bytes."""
        return torch.cat((self.encode(indices), values.to(torch.float32).view(torch.uint8)))

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and values of entries."""
        if not self.num_values:  # an empty row may lie at an odd place, where torch sees no float32
            return torch.empty(0, dtype=torch.int64, device=packed.device), torch.empty(0, device=packed.device)
        split = self.indices_bytes
        return self.decode(packed[:split]), packed[split : self.packed_bytes].view(torch.float32)

    def sum(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the entries in all rows add up to, as a flat tensor at least as precise as float32."""
        # In the order of ranks, so that every rank comes to the same bits.
        total = torch.zeros(self.numel, dtype=torch.promote_types(dtype, torch.float32), device=rows.device)
        for row in rows:
            indices, values = self.unpack(row)
            total[indices] += values.to(total.dtype)
        return total


@dataclass(frozen=True)
class EntriesOfChunks(Entries):
    """As many entries of every chunk, so that where each is in its chunk is all there is to say."""

    chunks: tuple[tuple[int, int, int], ...] = ()
    """In the order of the bucket: how many chunks, how long, and how many entries of each."""

    @cached_property
    def _bits(self) -> int:
        """Of an index in its chunk."""
        return max((length - 1 for _, length, _ in self.chunks), default=0).bit_length()

    @property
    def indices_bytes(self) -> int:
        """See Entries."""
        return -(-self.num_values * self._bits // 32) * 4

    def encode(self, indices: torch.Tensor) -> torch.Tensor:
        """See Entries."""
        packed = torch.zeros(self.indices_bytes, dtype=torch.uint8, device=indices.device)
        inside = (indices - self._begins(indices.device)).to(torch.int16)
        write_bits((inside.unsqueeze(1) >> self._each_bit(indices.device) & 1).view(-1), packed)
        return packed

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """See Entries."""
        assert packed.numel() == self.indices_bytes, f"{packed.numel()} bytes for {self.num_values} entries"
        bits = bits_of(packed)[: self.num_values * self._bits].view(-1, self._bits).to(torch.int16)
        return (bits << self._each_bit(packed.device)).sum(1, dtype=torch.int64) + self._begins(packed.device)

    def _each_bit(self, device: torch.device) -> torch.Tensor:
        return torch.arange(self._bits, dtype=torch.int16, device=device)

    def _begins(self, device: torch.device) -> torch.Tensor:
        """Where the chunk of each entry begins."""
        begins, start = [], 0
        for count, length, kept in self.chunks:
            begins.append(torch.arange(start, start + count * length, length, device=device).repeat_interleave(kept))
            start += count * length
        return torch.cat(begins)
