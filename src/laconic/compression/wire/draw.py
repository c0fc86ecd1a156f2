"""Positions drawn at random, the same on every rank: one entry of each of k nearly equal pieces of a tensor.

Cuts between pieces move from step to step, so all positions are equally likely; they are distinct, and nothing has to
be sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from laconic.compression.wire.entries import num_kept
from laconic.compression.wire.seeds import base_seed, mix_tensor, moment_seed
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState


@dataclass(frozen=True)
class Draw:
    """The pieces of every tensor of a bucket, one after the other, and the entries drawn from them."""

    bucket: Bucket
    density: float

    @cached_property
    def counts(self) -> list[int]:
        """Pieces of each tensor."""
        return [num_kept(self.density, tensor.numel) for tensor in self.bucket.tensors]

    @cached_property
    def owners(self) -> torch.Tensor:
        """Which tensor each piece belongs to."""
        return torch.repeat_interleave(self._whole(range(len(self.counts))), self._whole(self.counts))

    @cached_property
    def numbers(self) -> torch.Tensor:
        """The number of each piece in its tensor."""
        return torch.cat([torch.arange(count) for count in self.counts]).to(self.bucket.device)

    @cached_property
    def starts(self) -> torch.Tensor:
        """Where the tensor of each piece begins in the bucket."""
        return self._whole([place.start for _, place in self.bucket.segments()])[self.owners]

    @cached_property
    def numels(self) -> torch.Tensor:
        """Entries of each tensor."""
        return self._whole([tensor.numel for tensor in self.bucket.tensors])

    @cached_property
    def cuts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin and length of each piece: piece i of k has the entries from i n / k to (i + 1) n / k."""
        numels, counts = self.numels[self.owners], self._whole(self.counts)[self.owners]
        begins = self.numbers * numels // counts
        return begins, (self.numbers + 1) * numels // counts - begins

    @cached_property
    def seeds(self) -> torch.Tensor:
        """The base seed of each tensor."""
        return self._whole([base_seed(tensor.name, 0) for tensor in self.bucket.tensors])

    @cached_property
    def factors(self) -> torch.Tensor:
        """Entries of the tensor of each piece, divided by its number of pieces."""
        return (self.numels.to(torch.float64) / self._whole(self.counts))[self.owners]

    def indices(self, moment: Moment) -> torch.Tensor:
        """The position of one entry of each piece, the same on every rank."""
        seeds = mix_tensor(self.seeds ^ moment_seed(moment, shared=True))
        shifts = mix_tensor(seeds) * self.numels >> 32
        begins, lengths = self.cuts
        drawn = mix_tensor(self.numbers + seeds[self.owners]) * lengths >> 32
        return self.starts + (begins + drawn + shifts[self.owners]) % self.numels[self.owners]

    def _whole(self, numbers: list[int] | range) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.bucket.device)


def draw_of(state: BucketState, density: float) -> Draw:
    """The pieces of a state's bucket, computed once."""
    key = ("draw", density)
    if key not in state.tables:
        state.tables[key] = Draw(state.bucket, density)
    draw: Draw = state.tables[key]
    return draw
