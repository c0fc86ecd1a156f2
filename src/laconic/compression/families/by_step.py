"""One compressor in some steps, another in all others."""

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
    """`first` in the steps that `is_first` says, the wrapped method in the others."""

    first: Compressor = method(NoCompression(), wants=Compressor)
    """What sends those steps' gradients: one that remembers nothing, such as int8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first.traits.keeps_residual or self.first.on_resize or not self.first.traits.keeps_scale:
            raise InvalidSetting(
                f'compression.{self.name}.first = "{self.first}" is used in some steps only, so it must remember '
                "nothing and send values with their size. Use none, bf16, int8 or int4."
            )

    def is_first(self, step: int) -> bool:
        """Whether `first` sends what is exchanged in this step."""
        raise NotImplementedError

    def _now(self, moment: Moment) -> Compressor:
        return self.first if self.is_first(moment.step) else self.inner

    def _state_now(self, state: BucketState) -> BucketState:
        if not self.is_first(state.moment.step):
            return state
        beginning: BucketState = state.tables.setdefault(_FIRST, self.first.init(state.bucket))
        beginning.moment, beginning.measure, beginning.metrics = state.moment, state.measure, state.metrics
        return beginning

    def traits_around(self, inner: Traits) -> Traits:
        """What holds only if it holds in both phases."""
        first = self.first.traits
        return replace(
            inner,
            warms_up=True,
            payloads_add_up=inner.payloads_add_up and first.payloads_add_up,
            sums_only=inner.sums_only and first.sums_only,
            decodes_alone=inner.decodes_alone and first.decodes_alone,
            exact_bytes=inner.exact_bytes and first.exact_bytes,
            scale_equivariant=inner.scale_equivariant and first.scale_equivariant,
            needs_whole_tensors=inner.needs_whole_tensors or first.needs_whole_tensors,
            dtypes=tuple(dtype for dtype in inner.dtypes if dtype in first.dtypes),
        )

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """What the compressor of this step sends."""
        return self._now(moment).rounds(bucket, moment)

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """As many as the compressor of this step has."""
        return self._now(moment).num_waits(bucket, moment)

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        """As the compressor of this step does."""
        return self._now(state.moment).encode(flat, self._state_now(state))

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        """As the compressor of this step does."""
        self._now(state.moment).decode(payload, out, self._state_now(state))

    def payload_bytes(self, bucket: Bucket, moment: Moment) -> int:
        """As the compressor of this step."""
        return self._now(moment).payload_bytes(bucket, moment)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """As the compressor of this step does; of its loss on the way back nothing is remembered."""
        return self._now(state.moment).exchange(flat, self._state_now(state), group, own)
