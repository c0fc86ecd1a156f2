"""The operations that a synchronization rule can request from all ranks while one bucket is exchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laconic.core.exchange import Exchange, Wire
from laconic.core.stateful import BucketState
from laconic.strategy import Strategy


@dataclass(frozen=True)
class Averaging:
    """The architecture and the compressor of a strategy, applied to one bucket."""

    strategy: Strategy
    state: BucketState
    wire: Wire

    def __call__(self, flat: torch.Tensor, own: torch.Tensor | None) -> Exchange:
        """Replace `flat` by the mean; fill `own`, if given, with what this rank contributed to it."""
        return self.strategy.architecture.exchange(flat, self.state, self.strategy.codec, self.wire, own)

    def total(self, number: torch.Tensor) -> Exchange:
        """Replace a number by its sum over all ranks; counted as control traffic."""
        transport = self.wire.transport
        if transport.world_size > 1:
            there = number.to(transport.control_device).reshape(1)
            yield transport.all_reduce(there, purpose="control", what=f"a question about {self.wire.what}")
            number.copy_(there.reshape(number.shape))
