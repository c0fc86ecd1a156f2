"""Send gradients in a 16-bit floating-point format: fp16 and bf16 share this implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.kernels.quantizers import encode
from laconic.compression.kernels.row_sums import sum_of_rows
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.chunks import chunks_of
from laconic.compression.wire.seeds import moment_seed
from laconic.core.exchange import Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import choice

_BLOCK = 4096
"""Values whose random numbers have one seed."""


@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Round every value to `wire_dtype` and add up in that precision.

    With stochastic rounding the payload of a rank is unbiased; sums are still rounded to nearest where they are formed,
    so the result is nearly unbiased. float64 is then rounded to float32 first. NaN and infinity are preserved.
    """

    wire_dtype: ClassVar[torch.dtype]
    family: ClassVar[str] = "quantization"

    rounding: str = choice("nearest", "stochastic")
    """nearest: the smallest error. stochastic: up or down at random, so that errors cancel out on average."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Each value is rounded by itself, and each sum of values too."""
        return replace(super().traits, tensor_by_tensor=True, rounds_sums=True)

    def is_lossless_for(self, dtype: torch.dtype) -> bool:
        """True for the dtype that is sent."""
        return dtype == self.wire_dtype

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The rounded copy (the tensor itself if it has that type already)."""
        if self.rounding == "nearest" or flat.dtype == self.wire_dtype:
            return Payload((flat.to(self.wire_dtype),))
        chunks = chunks_of(state, block=_BLOCK, bits=16, num_scales=0)
        packed = encode(self.name, flat, chunks, moment_seed(state.moment))
        return Payload((packed[: 2 * flat.numel()].view(self.wire_dtype),))

    def encode_rows(self, rows: torch.Tensor, states: Sequence[BucketState]) -> Payload:
        """In one pass, if each value is rounded to the nearest."""
        if self.rounding == "nearest" or rows.dtype == self.wire_dtype:
            return Payload((rows.to(self.wire_dtype).contiguous(),))
        return super().encode_rows(rows, states)

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Widen again."""
        if payload.tensors[0] is not out:
            out.copy_(payload.tensors[0])

    def add_decoded(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Without a copy, where widening is exact."""
        (values,) = payload.tensors
        if torch.promote_types(values.dtype, out.dtype) == out.dtype:
            out += values
        else:
            super().add_decoded(payload, out, state)

    def sum_decoded_rows(self, payloads: Payload, out: torch.Tensor, state: BucketState) -> None:
        """In one pass on a GPU."""
        sum_of_rows(payloads.tensors[0], out)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One sum of two bytes per element."""
        return (Round("sum", (bucket.numel * self.wire_dtype.itemsize,)),)


@dataclass(frozen=True, kw_only=True)
class Fp16(Cast):
    """Round to IEEE half precision: 11 significant bits, largest value 65504, beyond which values become infinite.

    decoded = fp32(fp16(g))
    """

    name: ClassVar[str] = "fp16"
    good_for: ClassVar[str] = "half the bytes at no cost in loss, on GPUs that add fp16 fast"
    wire_dtype: ClassVar[torch.dtype] = torch.float16

    @property
    @computed_once
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=-0.002, loss_deviation=0.002)


@dataclass(frozen=True, kw_only=True)
class Bf16(Cast):
    """Round to bfloat16: 8 significant bits and the range of fp32, so nothing overflows.

    decoded = fp32(bf16(g))
    """

    name: ClassVar[str] = "bf16"
    good_for: ClassVar[str] = "half the bytes at no cost in loss; the first thing to try"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16

    @property
    @computed_once
    def traits(self) -> Traits:
        """Measured with default settings."""
        return replace(super().traits, loss_gap=0.004, loss_deviation=0.003)
