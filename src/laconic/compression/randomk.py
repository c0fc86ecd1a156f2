"""Send entries chosen at random, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.traits import Traits
from laconic.compression.wire.entries import num_kept
from laconic.compression.wire.seeds import base_seed, mix_tensor, moment_seed
from laconic.core.exchange import Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.settings import flag, share


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Send k random entries of each tensor, the same ones on every rank, so that values alone travel and add up.

        k = ceil(density * numel),   m = mask of k places drawn from (step, parameter),   decoded = m * g

    Each tensor is cut into k nearly equal pieces, at cuts that move from step to step, and one entry of each piece is
    drawn: places are distinct, all are equally likely, and nothing has to be sorted. Values travel in the precision
    of the gradient.

    Reference: Stich et al. 2018, arXiv:1809.07599.
    """

    name: ClassVar[str] = "randomk"

    density: float = share(0.01)
    """Share of the entries of each tensor that is sent; at least one of each."""
    scale: bool = flag(False)
    """Multiply what is sent by numel / k, so that what arrives is right on average; refused under error_feedback, which
    would take the factor for an error and send it back."""

    @property
    def traits(self) -> Traits:
        """With `scale` it is right on average and needs no residual; without, entries that are not sent are lost."""
        return replace(
            super().traits,
            unbiased=self.scale,
            amplifies=self.scale,
            wants_error_feedback=not self.scale,
            loss_gap=0.343,
        )

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """The values at the places of this step."""
        draw = self._draw(state)
        values = flat[draw.indices(state.moment)]
        return Payload((values * draw.factors.to(flat.dtype) if self.scale else values,))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Zeros, and the values in their places."""
        out.zero_()
        out[self._draw(state).indices(state.moment)] = payload.tensors[0]

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """One sum of k values of each tensor."""
        num_values = sum(num_kept(self.density, tensor.numel) for tensor in bucket.tensors)
        return (Round("sum", (num_values * bucket.dtype.itemsize,)),)

    def _draw(self, state: BucketState) -> _Draw:
        key = ("randomk", self.density)
        if key not in state.tables:
            state.tables[key] = _Draw(state.bucket, self.density)
        draw: _Draw = state.tables[key]
        return draw


@dataclass(frozen=True)
class _Draw:
    """The pieces of every tensor of a bucket, one after the other, and what is drawn from them."""

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
        """What the tensor of each piece has in entries, divided by its pieces."""
        return (self.numels.to(torch.float64) / self._whole(self.counts))[self.owners]

    def indices(self, moment: Moment) -> torch.Tensor:
        """The place of one entry of each piece, the same on every rank."""
        seeds = mix_tensor(self.seeds ^ moment_seed(moment, shared=True))
        shifts = mix_tensor(seeds) * self.numels >> 32
        begins, lengths = self.cuts
        drawn = mix_tensor(self.numbers + seeds[self.owners]) * lengths >> 32
        return self.starts + (begins + drawn + shifts[self.owners]) % self.numels[self.owners]

    def _whole(self, numbers: list[int] | range) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.bucket.device)
