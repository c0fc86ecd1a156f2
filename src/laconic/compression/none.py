"""Send gradients as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.core.exchange import Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState


@dataclass(frozen=True, kw_only=True)
class NoCompression(Compressor):
    """Send every value in its own precision.

    decoded = g
    """

    name: ClassVar[str] = "none"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (*Compressor.dtypes, torch.complex64, torch.complex128)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The tensor itself, so that the sum happens in place."""
        return Payload((flat,))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Nothing to do when the sum happened in place."""
        if payload.tensors[0] is not out:
            out.copy_(payload.tensors[0])

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One sum of the plain bytes."""
        return (Round("sum", (bucket.nbytes,)),)
