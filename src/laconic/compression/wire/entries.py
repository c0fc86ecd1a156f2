"""A few entries of each tensor: their positions, then their values.

A packed bucket is the coded indices of all its entries (wire/indices.py), then their values as float32. Where every
chunk of a tensor has the same number of entries, an index is the position in its chunk, in the fewest bits. Entries are
chosen tensor by tensor, so the entries of a parameter do not depend on its bucket. Values of float64 tensors are
rounded to float32, and those beyond its range become infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from laconic.compression.kernels.topk import topk_indices, topk_of_rows
from laconic.compression.wire.bits import numbers_of, write_numbers
from laconic.compression.wire.indices import decode_indices, encode_indices, indices_bytes
from laconic.core.plan import Bucket


def num_kept(density: float, numel: int) -> int:
    """The number of entries for this share of a tensor, rounded up: at least one if it has any."""
    return min(numel, math.ceil(density * numel))


@dataclass(frozen=True)
class Entries:
    """A fixed number of entries of each tensor of a bucket, and their packing."""

    bucket: Bucket
    counts: tuple[int, ...]
    coding: str

    @cached_property
    def numel(self) -> int:
        """The number of values that entries are chosen from."""
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
        """Bytes of the whole payload."""
        return self.indices_bytes + 4 * self.num_values

    def largest(self, flat: torch.Tensor) -> torch.Tensor:
        """Positions of the largest magnitudes of each tensor in the flat tensor, in ascending order."""
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
        """Decode the indices from exactly `indices_bytes` bytes."""
        return decode_indices(packed, self.numel, self.num_values, self.coding)

    def pack(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Entries as bytes."""
        return torch.cat((self.encode(indices), values.to(torch.float32).view(torch.uint8)))

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and values of entries."""
        if not self.num_values:  # an empty row may be misaligned, which torch refuses for float32
            return torch.empty(0, dtype=torch.int64, device=packed.device), torch.empty(0, device=packed.device)
        split = self.indices_bytes
        return self.decode(packed[:split]), packed[split : self.packed_bytes].view(torch.float32)

    def sum(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of the entries in all rows, as a flat tensor at least as precise as float32."""
        # In the order of ranks, so that every rank comes to the same bits.
        total = torch.zeros(self.numel, dtype=torch.promote_types(dtype, torch.float32), device=rows.device)
        for row in rows:
            indices, values = self.unpack(row)
            total[indices] += values.to(total.dtype)
        return total


@dataclass(frozen=True)
class EntriesOfChunks(Entries):
    """The same number of entries of every chunk, so that only positions inside chunks are sent."""

    chunks: tuple[tuple[int, int, int], ...] = ()
    """In the order of the bucket: the number of chunks, their length, and the entries of each."""

    @cached_property
    def _bits(self) -> int:
        """Bits of an index in its chunk."""
        return max((length - 1 for _, length, _ in self.chunks), default=0).bit_length()

    @property
    def indices_bytes(self) -> int:
        return -(-self.num_values * self._bits // 32) * 4

    def encode(self, indices: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(self.indices_bytes, dtype=torch.uint8, device=indices.device)
        write_numbers((indices - self._begins(indices.device)).to(torch.int16), self._bits, packed)
        return packed

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        assert packed.numel() == self.indices_bytes, f"{packed.numel()} bytes for {self.num_values} entries"
        return numbers_of(packed, self._bits, self.num_values, torch.int16) + self._begins(packed.device)

    def _begins(self, device: torch.device) -> torch.Tensor:
        """The start of the chunk of each entry."""
        begins, start = [], 0
        for count, length, kept in self.chunks:
            begins.append(torch.arange(start, start + count * length, length, device=device).repeat_interleave(kept))
            start += count * length
        return torch.cat(begins)


Rows = tuple[tuple[int, int], slice]
"""Chunks of one length as the rows of a matrix, and their position in the bucket."""


def rows_of_chunks(bucket: Bucket, chunk: int) -> list[Rows]:
    """The chunks of each tensor as one matrix, and the rest of it as a matrix of one row; none is empty."""
    found: list[Rows] = []
    for tensor, place in bucket.segments():
        whole, rest = divmod(tensor.numel, chunk)
        split = place.stop - rest
        if whole:
            found.append(((whole, chunk), slice(place.start, split)))
        if rest:
            found.append(((1, rest), slice(split, place.stop)))
    return found


def joined(parts: list[Rows]) -> list[Rows]:
    """The same chunks in as few matrices as possible: adjacent chunks of one length form one matrix."""
    found: list[Rows] = []
    for rows, place in parts:
        if found and found[-1][0][1] == rows[1]:
            (before, length), start = found[-1][0], found[-1][1].start
            found[-1] = ((before + rows[0], length), slice(start, place.stop))
        else:
            found.append((rows, place))
    return found


def entries_of_chunks(plain: Entries, chunk: int, density: float) -> Entries:
    """The same number of entries of each chunk, packed as such where that takes fewer bytes."""
    rows = joined(rows_of_chunks(plain.bucket, chunk))
    chunks = tuple((*shape, num_kept(density, shape[1])) for shape, _ in rows)
    chunked = EntriesOfChunks(plain.bucket, plain.counts, plain.coding, chunks)
    return chunked if plain.coding == "auto" and chunked.indices_bytes < plain.indices_bytes else plain


def largest_of_chunks(flat: torch.Tensor, bucket: Bucket, chunk: int, density: float) -> torch.Tensor:
    """Positions of the largest magnitudes of each chunk in the flat tensor, in ascending order."""
    indices = [torch.empty(0, dtype=torch.int64, device=flat.device)]
    for rows, place in joined(rows_of_chunks(bucket, chunk)):
        chosen = topk_of_rows(flat[place].view(rows), num_kept(density, rows[1]))
        begins = torch.arange(place.start, place.stop, rows[1], device=flat.device)
        indices.append((chosen + begins.unsqueeze(1)).view(-1))
    return torch.cat(indices)


def num_kept_of_chunks(density: float, numel: int, chunk: int) -> int:
    """The number of entries of a tensor if this share of each of its chunks is kept."""
    return numel // chunk * num_kept(density, chunk) + num_kept(density, numel % chunk)
