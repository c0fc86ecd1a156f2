"""A few entries of each tensor: where they are, then what they are.

A packed bucket is the coded indices of all its entries (wire/indices.py), then their values as float32. Entries are
chosen tensor by tensor, so what is sent of a parameter does not depend on the bucket it travels in. Values of float64
tensors are rounded to float32, and those beyond its range become infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from laconic.compression.kernels.topk import topk_indices
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

    def pack(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Entries as bytes."""
        coded = encode_indices(indices, self.numel, self.coding)
        return torch.cat((coded, values.to(torch.float32).view(torch.uint8)))

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and values of entries."""
        if not self.num_values:  # an empty row may lie at an odd place, where torch sees no float32
            return torch.empty(0, dtype=torch.int64, device=packed.device), torch.empty(0, device=packed.device)
        split = self.indices_bytes
        indices = decode_indices(packed[:split], self.numel, self.num_values, self.coding)
        return indices, packed[split : self.packed_bytes].view(torch.float32)

    def sum(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the entries in all rows add up to, as a flat tensor at least as precise as float32."""
        # In the order of ranks, so that every rank comes to the same bits.
        total = torch.zeros(self.numel, dtype=torch.promote_types(dtype, torch.float32), device=rows.device)
        for row in rows:
            indices, values = self.unpack(row)
            total[indices] += values.to(total.dtype)
        return total
