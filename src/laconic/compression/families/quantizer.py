"""The base of all quantizers: chunks of codes with their scales, written and read by a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch

from laconic.compression.families.packed import Packed
from laconic.compression.kernels.quantizers import decode, decode_rows, encode, encode_keeping, encode_rows, sum_rows
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.chunks import Chunks, chunks_of
from laconic.compression.wire.seeds import moment_seed
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class Quantizer(Packed):
    """Send each value as a code of a few bits and, for each block of a parameter, its scales in float32.

    All arithmetic is in float32; float64 is rounded to it first. A block that holds a NaN or an infinity arrives as NaN
    as a whole. A kernel gets the chunks and its settings: integers, floats or booleans.
    """

    encoder: ClassVar[str]
    """Name of the kernel that packs."""
    family: ClassVar[str] = "quantization"
    decoder: ClassVar[str]
    """Name of the kernel that unpacks."""
    num_scales: ClassVar[int] = 1
    """Scales per block."""

    block: int = count(256, at_least=32, at_most=65536)
    """Values that share a scale; no block holds values of two parameters."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """No block holds values of two tensors."""
        return replace(super().traits, tensor_by_tensor=True)

    @property
    def bits(self) -> int:
        """Bits per code, at most 8."""
        raise NotImplementedError

    def encoder_settings(self) -> dict[str, float]:
        """The settings of the packing kernel."""
        return {}

    def decoder_settings(self) -> dict[str, float]:
        """The settings of the unpacking kernel."""
        return {}

    def chunks(self, state: BucketState) -> Chunks:
        """The layout of scales and codes of a bucket."""
        return chunks_of(state, block=self.block, bits=self.bits, num_scales=self.num_scales)

    def pack(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        """Scales, codes, padding."""
        seed = moment_seed(state.moment)
        # pyrefly: ignore[bad-argument-type]  # no setting of a kernel is called reference
        return encode(self.encoder, flat, self.chunks(state), seed, **self.encoder_settings())

    def pack_rows(self, rows: torch.Tensor, states: Sequence[BucketState]) -> torch.Tensor:
        """With one launch of a kernel on a GPU."""
        chunks, seed = [self.chunks(state) for state in states], moment_seed(states[0].moment)
        # pyrefly: ignore[bad-argument-type]  # no setting of a kernel is called reference
        return encode_rows(self.encoder, rows, chunks, seed, **self.encoder_settings())

    def encode_keeping(self, flat: torch.Tensor, residual: torch.Tensor, state: BucketState) -> Payload:
        """In one pass on a GPU."""
        packed = self._pack_keeping(flat[None], [residual], [state])
        return super().encode_keeping(flat, residual, state) if packed is None else Payload((packed[0],))

    def encode_rows_keeping(
        self, rows: torch.Tensor, residuals: Sequence[torch.Tensor], states: Sequence[BucketState]
    ) -> Payload:
        """In one pass, with one launch of a kernel, on a GPU."""
        packed = self._pack_keeping(rows, residuals, states)
        return super().encode_rows_keeping(rows, residuals, states) if packed is None else Payload((packed,))

    def _pack_keeping(
        self, rows: torch.Tensor, residuals: Sequence[torch.Tensor], states: Sequence[BucketState]
    ) -> torch.Tensor | None:
        chunks, seed = [self.chunks(state) for state in states], moment_seed(states[0].moment)
        return encode_keeping(self.encoder, rows, residuals, chunks, seed, **self.encoder_settings())

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """Decode the codes with their scales."""
        # pyrefly: ignore[bad-argument-type]  # no setting of a kernel is called reference
        decode(self.decoder, packed, self.chunks(state), out, **self.decoder_settings())

    def add_unpacked(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """In one pass."""
        # pyrefly: ignore[bad-argument-type]  # no setting of a kernel is called reference
        decode(self.decoder, packed, self.chunks(state), out, add=True, **self.decoder_settings())

    def unpack_rows(self, rows: torch.Tensor, outs: torch.Tensor, state: BucketState) -> None:
        """With one launch of a kernel on a GPU."""
        # pyrefly: ignore[bad-argument-type]  # no setting of a kernel is called reference
        decode_rows(self.decoder, rows, self.chunks(state), outs, **self.decoder_settings())

    def sum_unpacked_rows(self, rows: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        """With one launch of a kernel on a GPU, which writes `out` once."""
        # pyrefly: ignore[bad-argument-type]  # no setting of a kernel is called reference
        sum_rows(self.decoder, rows, self.chunks(state), out, **self.decoder_settings())

    def packed_bytes(self, bucket: Bucket) -> int:
        """Bytes of scales, codes and padding, as `chunks` counts them."""
        return _packed_bytes(bucket, self.block, self.bits, self.num_scales)


@dataclass(frozen=True, kw_only=True)
class Levels(Quantizer):
    """A quantizer whose codes are multiples of a unit, such as qsgd; the multiples reach from -largest to largest."""

    decoder: ClassVar[str] = "levels"

    @property
    def largest_level(self) -> int:
        """The largest multiple."""
        raise NotImplementedError

    @property
    def bits(self) -> int:
        """As many bits as the multiples of either sign and zero need."""
        return (2 * self.largest_level).bit_length()

    def decoder_settings(self) -> dict[str, float]:
        """The largest multiple."""
        return {"largest": self.largest_level}


# Asked for several times in every exchange, and a large bucket has many chunks.
@lru_cache(maxsize=4096)
def _packed_bytes(bucket: Bucket, block: int, bits: int, num_scales: int) -> int:
    return Chunks(bucket, block, bits, num_scales).packed_bytes
