"""The base of sparsifiers that first agree on positions: then only values are sent, in one all-reduce."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor
from laconic.compression.traits import Traits, computed_once
from laconic.compression.wire.entries import Entries, num_kept
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.transport import Work
from laconic.settings import share

Agreement = Generator[Work, None, torch.Tensor]
"""Rounds after which every rank knows the same ascending positions."""


@dataclass(frozen=True, kw_only=True)
class CommonPlaces(Compressor):
    """All ranks send the same k entries of each tensor, in the precision of the gradient; the others arrive as zero.

    A method implements `agree`, all rounds of which are sums, and `agreement_rounds`.
    """

    family: ClassVar[str] = "sparsification"

    density: float = share(0.01)
    """Share of the entries of each tensor that is sent; at least one of each."""

    @property
    @computed_once
    def traits(self) -> Traits:
        """Every round is a sum, but the positions are known only after the first."""
        return replace(
            super().traits,
            density=self.density,
            wants_error_feedback=True,
            decodes_alone=False,
            sums_only=True,
            payloads_add_up=False,
        )

    def agree(self, flat: torch.Tensor, state: BucketState, group: Group) -> Agreement:
        """The positions of `entries`, the same on every rank."""
        raise NotImplementedError

    def agreement_rounds(self, bucket: Bucket) -> tuple[Round, ...]:
        """The rounds of `agree`."""
        raise NotImplementedError

    def entries(self, bucket: Bucket) -> Entries:
        """The number of entries of each tensor that are sent."""
        return Entries(bucket, tuple(num_kept(self.density, tensor.numel) for tensor in bucket.tensors), "auto")

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The agreement, then a sum of values."""
        values = Round("sum", (self.entries(bucket).num_values * bucket.dtype.itemsize,))
        return (*self.agreement_rounds(bucket), values)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Agree on positions, then sum the values there."""
        places = yield from self.agree(flat, state, group)
        values = flat[places]
        if own is not None:
            own.zero_()
            own[places] = values
        yield group.sum((values,))
        flat.zero_()
        flat[places] = values
