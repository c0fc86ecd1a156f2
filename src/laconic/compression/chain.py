"""Use a second compressor for the values that a sparsifier has selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor, Wrapper
from laconic.compression.families.packed import Packed
from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.integer import Int8
from laconic.compression.traits import Traits
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination, InvalidSetting
from laconic.settings import method


@dataclass(frozen=True, kw_only=True)
class Chain(Wrapper):
    """Use a second compressor for the values that the wrapped sparsifier selects.

        I = places selected by the first,   send I and C2(g[I]),   decoded = C2's values at I, zero elsewhere

    The selected values of each parameter form one tensor, so blocks of the second compressor never mix parameters. The
    first compressor decides how payloads are combined (route).

    Reference: Basu et al. 2019 (Qsparse-local-SGD), arXiv:1906.02367.
    """

    name: ClassVar[str] = "chain"
    good_for: ClassVar[str] = "sparsifiers whose values can be sent in few bits"
    wraps: ClassVar[type[Compressor]] = Sparsifier

    second: Compressor = method(Int8(), wants=Packed)
    """The compressor of the selected values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "route" in self.second.changed_settings():
            raise InvalidSetting(
                f'compression.chain.second = "{self.second}": route has no effect here. Set it on the method that '
                "selects, before the +."
            )

    def traits_around(self, inner: Traits) -> Traits:
        """Traits that hold if both methods have them, and traits that hold if one of them does."""
        second = self.second.traits
        return replace(
            inner,
            unbiased=inner.unbiased and second.unbiased,
            keeps_scale=inner.keeps_scale and second.keeps_scale,
            scale_equivariant=inner.scale_equivariant and second.scale_equivariant,
            amplifies=inner.amplifies or second.amplifies,
            payloads_add_up=False,
            density=inner.density * second.density,
            at_random=inner.at_random or second.at_random,
            exact_bytes=inner.exact_bytes and second.exact_bytes,
        )

    def check(self, tensors: Sequence[TensorSpec], optimizer: OptimizerFacts) -> None:
        """Check both methods, each for its input."""
        both = self._both
        both.sparse.check(tensors, optimizer)
        both.second.check(both.sparse.values_bucket(Bucket(tuple(tensors))).tensors, optimizer)

    def init(self, bucket: Bucket) -> BucketState:
        """The state of the first compressor, and that of the second for the selected values."""
        return self._both.init(bucket)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of packed payloads, by the route of the wrapped sparsifier."""
        return self._both.rounds(bucket, moment)

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """One for each round."""
        return self._both.num_waits(bucket, moment)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """Coded places, then coded values."""
        return self._both.encode(flat, state)

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """The values in their places."""
        self._both.decode(payload, out, state)

    def add_decoded(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """Add the values in their places."""
        self._both.add_decoded(payload, out, state)

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """Bytes of the coded places and the coded values."""
        return self._both.packed_bytes(bucket)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange packed payloads, by the route of the wrapped sparsifier."""
        return self._both.exchange(flat, state, group, own)

    @property
    def _both(self) -> _Both:
        if not isinstance(self.inner, Sparsifier):
            raise IllegalCombination(
                f'compression.chain wraps a method that sends a few entries, such as topk, got "{self.inner}".'
            )
        if not isinstance(self.second, Packed):
            raise IllegalCombination(
                f'compression.chain.second codes values into bytes, which "{self.second}" does not. Use int8.'
            )
        return _Both(sparse=self.inner, second=self.second, route=self.inner.route)


@dataclass(frozen=True, kw_only=True)
class _Both(Packed):
    """Both methods as one: coded places, then coded values."""

    name: ClassVar[str] = "chain"
    sparse: Sparsifier
    second: Packed

    def init(self, bucket: Bucket) -> BucketState:
        state = self.sparse.init(bucket)
        state.parts.append(self.second.init(self.sparse.values_bucket(bucket)))
        return state

    def pack(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        places, values = self.sparse.selected(flat, state)
        coded = self.second.pack(values.to(torch.float32), state.part(-1))
        return torch.cat((self.sparse.pack_indices(places, state.bucket), coded))

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, state: BucketState) -> None:
        self.sparse.place(*self._entries(packed, state), out, state)

    def packed_bytes(self, bucket: Bucket) -> int:
        values = self.second.packed_bytes(self.sparse.values_bucket(bucket))
        return self.sparse.indices_bytes(bucket) + values

    def _entries(self, packed: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        split = self.sparse.indices_bytes(state.bucket)
        places = self.sparse.unpack_indices(packed[:split], state.bucket)
        values = torch.empty(places.numel(), dtype=torch.float32, device=packed.device)
        self.second.unpack(packed[split : self.packed_bytes(state.bucket)], values, state.part(-1))
        return places, values

    def _sum(self, rows: torch.Tensor, like: torch.Tensor, state: BucketState) -> torch.Tensor:
        # In the order of ranks, so that every rank comes to the same bits.
        num_places = self.sparse.entries(state.bucket).numel
        total = torch.zeros(num_places, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        for row in rows:
            places, values = self._entries(row, state)
            total[places] += values.to(total.dtype)
        return self.sparse.dense(total, state)
