"""One compressor for some exchanges, another for all others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from laconic.compression.contract import Compressor, Wrapper
from laconic.compression.none import NoCompression
from laconic.compression.traits import Traits
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.payload import Payload
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.errors import InvalidSetting
from laconic.settings import method

_FIRST = "by_step.first"


@dataclass(frozen=True, kw_only=True)
class ByStep(Wrapper):
    """`first` for the exchanges that `is_first` selects, the wrapped method for the others."""

    first: Compressor = method(NoCompression(), wants=Compressor)
    """The compressor used instead in the selected steps: one without state, such as int8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.first, Wrapper):
            raise InvalidSetting(
                f'compression.{self.name}.first = "{self.first}" is a wrapper, and only a method without wrappers fits '
                "here. Use none, bf16, int8 or int4."
            )
        if self.first.traits.keeps_residual or self.first.on_resize or not self.first.traits.keeps_scale:
            raise InvalidSetting(
                f'compression.{self.name}.first = "{self.first}" is used in some steps only, so it must remember '
                "nothing and send values with their size. Use none, bf16, int8 or int4."
            )

    def is_first(self, bucket: Bucket, moment: Moment) -> bool:
        """Whether `first` sends this bucket now."""
        raise NotImplementedError

    def is_first_in(self, state: BucketState) -> bool:
        """Whether `first` sends the bucket of this state now."""
        return self.is_first(state.bucket, state.moment)

    def _now(self, bucket: Bucket, moment: Moment) -> Compressor:
        return self.first if self.is_first(bucket, moment) else self.inner

    def _of(self, state: BucketState) -> tuple[Compressor, BucketState]:
        """The compressor of this step, and its state."""
        if not self.is_first_in(state):
            return self.inner, state
        # Of this layer: another one inside or outside of it, which shares the state, has a `first` of its own.
        key = (_FIRST, self.name)
        if key not in state.tables:
            state.tables[key] = self.first.init(state.bucket)
        beginning: BucketState = state.tables[key]
        beginning.moment, beginning.measure, beginning.metrics = state.moment, state.measure, state.metrics
        beginning.owed = state.owed
        return self.first, beginning

    def traits_around(self, inner: Traits) -> Traits:
        """Traits that must hold in both phases."""
        first = self.first.traits
        return replace(
            inner,
            warms_up=True,
            amplifies=inner.amplifies or first.amplifies,
            rounds_sums=inner.rounds_sums or first.rounds_sums,
            sends_sums_back=inner.sends_sums_back or first.sends_sums_back,
            gives_factors=inner.gives_factors and first.gives_factors,
            payloads_add_up=inner.payloads_add_up and first.payloads_add_up,
            density=min(inner.density, first.density),
            at_random=inner.at_random or first.at_random,
            sends_every_value=inner.sends_every_value and first.sends_every_value,
            sums_only=inner.sums_only and first.sums_only,
            decodes_alone=inner.decodes_alone and first.decodes_alone,
            exact_bytes=inner.exact_bytes and first.exact_bytes,
            scale_equivariant=inner.scale_equivariant and first.scale_equivariant,
            tensor_by_tensor=inner.tensor_by_tensor and first.tensor_by_tensor,
            needs_whole_tensors=inner.needs_whole_tensors or first.needs_whole_tensors,
            dtypes=tuple(dtype for dtype in inner.dtypes if dtype in first.dtypes),
        )

    def one_by_one(self) -> Compressor:
        """Both compressors with payloads gathered."""
        return replace(self, inner=self.inner.one_by_one(), first=self.first.one_by_one())

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of the compressor of this step."""
        return self._now(bucket, moment).rounds(bucket, moment)

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """As many as the compressor of this step has."""
        return self._now(bucket, moment).num_waits(bucket, moment)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """As the compressor of this step does."""
        compressor, state = self._of(state)
        return compressor.encode(flat, state)

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """As the compressor of this step does."""
        compressor, state = self._of(state)
        compressor.decode(payload, out, state)

    def add_decoded(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """As the compressor of this step does."""
        compressor, state = self._of(state)
        compressor.add_decoded(payload, out, state)

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """As the compressor of this step."""
        return self._now(bucket, moment).payload_bytes(bucket, moment)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange with the compressor of this step."""
        owed = state.owed
        compressor, state = self._of(state)
        if own is None or owed is None or compressor.traits.sends_sums_back:
            yield from compressor.exchange(flat, state, group, own)
            return
        # No sum is sent back now, so what earlier ones have lost goes out as part of this rank's own values.
        flat += owed
        yield from compressor.exchange(flat, state, group, own)
        own -= owed
        owed.zero_()
