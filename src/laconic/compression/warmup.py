"""Begin without compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.compression.contract import Wrapper, uncompressed, uncompressed_rounds
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import count


@dataclass(frozen=True, kw_only=True)
class Warmup(Wrapper):
    """Send everything as it is for the first steps, then as the wrapped method does.

        decoded = g  while step < steps,   decode(C(g))  from then on

    Early gradients change fast and decide much; what compression loses of them is hard to make good later. Wrappers
    outside of it (error_feedback, momentum_correction) work from the first step on, those inside from `steps` on.

    Reference: Lin et al. 2018, arXiv:1712.01887; Vogels et al. 2019, arXiv:1905.13727.
    """

    name: ClassVar[str] = "warmup"
    needs_loss: ClassVar[bool] = True

    steps: int = count(1000, at_least=1)
    """Optimizer steps without compression, counted from the start of training."""

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One plain sum at first, then what the inner compressor sends."""
        return uncompressed_rounds(bucket) if moment.step < self.steps else self.inner.rounds(bucket, moment)

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """One at first, then as many as the inner compressor has."""
        return 1 if moment.step < self.steps else self.inner.num_waits(bucket, moment)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """As it is, or as the inner compressor does."""
        return Payload((flat,)) if state.moment.step < self.steps else self.inner.encode(flat, state)

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """As it is, or as the inner compressor does."""
        if state.moment.step >= self.steps:
            self.inner.decode(payload, out, state)
        elif payload.tensors[0] is not out:
            out.copy_(payload.tensors[0])

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """Everything at first, then as the inner compressor."""
        return bucket.nbytes if moment.step < self.steps else self.inner.payload_bytes(bucket, moment)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """As it is, or as the inner compressor does."""
        if state.moment.step < self.steps:
            return uncompressed(flat, group, own)
        return self.inner.exchange(flat, state, group, own)
