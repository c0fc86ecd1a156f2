"""Send signs and one of two magnitudes; made for values that a sparsifier has selected, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.packed import Packed
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.bits import bits_of, write_bits
from laconic.compression.wire.chunks import Chunks, chunks_of
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class TwoBit(Packed):
    """Send the sign of every value and whether it is large, and per block the means of small and of large magnitudes.

        a = mean |g|,   decoded = sign(g) * (mean of the |g| >= a where |g| >= a,   mean of the |g| < a elsewhere)

    In plain torch on every device: it is meant for the few values that topk selects. Arithmetic is in float32; a block
    that holds a NaN or an infinity arrives as NaN.

    Reference: Sarfi et al. 2025 (SparseLoCo, 2 bits for the values of top-k), arXiv:2508.15706.
    """

    name: ClassVar[str] = "twobit"
    family: ClassVar[str] = "quantization"
    good_for: ClassVar[str] = "the few values that a sparsifier selects"

    block: int = count(256, at_least=32, at_most=65536)
    """Values that share the two magnitudes; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Two bits per value lose much of it."""
        return replace(super().traits, wants_error_feedback=True, loss_gap=0.031, loss_deviation=0.033)

    def pack(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Scales, signs, sizes, padding."""
        chunks = self._chunks(state)
        packed = torch.zeros(self.packed_bytes(state.bucket), dtype=torch.uint8, device=flat.device)
        if not flat.numel():
            return packed
        values, chunk = flat.float(), chunks.chunk_of_element()
        sizes = values.abs()
        mean = _means(sizes, chunk, torch.ones_like(sizes), chunks.num_chunks)
        large = sizes >= mean[chunk]
        scales = [_means(sizes, chunk, mask.float(), chunks.num_chunks) for mask in (~large, large)]
        found = torch.stack(scales, 1)
        found[~mean.isfinite()] = torch.nan
        split, signs = chunks.scale_bytes, _bytes_for(flat.numel())
        packed[:split] = found.view(-1).view(torch.uint8)
        write_bits(values.signbit(), packed[split : split + signs])
        write_bits(large, packed[split + signs : split + 2 * signs])
        return packed

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """One of four values for each."""
        chunks, numel = self._chunks(state), out.numel()
        if not numel:
            return
        split, signs = chunks.scale_bytes, _bytes_for(numel)
        scales = packed[:split].clone().view(torch.float32).view(-1, 2)
        large = bits_of(packed[split + signs : split + 2 * signs])[:numel].long()
        sizes = scales[chunks.chunk_of_element(), large]
        out.copy_(torch.where(bits_of(packed[split : split + signs])[:numel].bool(), -sizes, sizes))

    def packed_bytes(self, bucket: Bucket) -> int:
        """Two float32 for each block, two bits for each value."""
        whole = Chunks(bucket, self.block, 2, 2).scale_bytes + 2 * _bytes_for(bucket.numel)
        return -(-whole // 4) * 4

    def _chunks(self, state: BucketState) -> Chunks:
        return chunks_of(state, block=self.block, bits=2, num_scales=2)


def _bytes_for(numel: int) -> int:
    return -(-numel // 8)


def _means(sizes: torch.Tensor, chunk: torch.Tensor, mask: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """The mean magnitude of each chunk where `mask` is one; 0 if there is none."""
    # In float64, so that the order in which a device adds hardly matters.
    wide = torch.where(mask.bool(), sizes, 0.0).double()
    total = torch.zeros(num_chunks, dtype=torch.float64, device=sizes.device).index_add_(0, chunk, wide)
    number = torch.zeros(num_chunks, device=sizes.device).index_add_(0, chunk, mask)
    return (total / number.clamp(min=1)).float()
