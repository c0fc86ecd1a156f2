"""Begin without compression, or with less of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

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
from laconic.settings import count, method

_FIRST = "warmup.first"


@dataclass(frozen=True, kw_only=True)
class Warmup(Wrapper):
    """Send everything as it is, or as `first` does, for the first steps, then as the wrapped method does.

        decoded = decode(C_first(g))  while step < steps,   decode(C(g))  from then on

    Early gradients change fast and decide much; what compression loses of them is hard to make good later. Wrappers
    outside of it (error_feedback, momentum_correction) work from the first step on, those inside from `steps` on.

    Reference: Lin et al. 2018, arXiv:1712.01887; Vogels et al. 2019, arXiv:1905.13727.
    """

    name: ClassVar[str] = "warmup"
    needs_loss: ClassVar[bool] = True

    steps: int = count(1000, at_least=1)
    """Optimizer steps before the wrapped method begins, counted from the start of training."""
    first: Compressor = method(NoCompression(), wants=Compressor)
    """What sends those steps' gradients: one that remembers nothing, such as int8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first.traits.keeps_residual or self.first.on_resize or not self.first.traits.keeps_scale:
            raise InvalidSetting(
                f'compression.warmup.first = "{self.first}" is used for a few steps only, so it must remember nothing '
                "and send values with their size. Use none, bf16, int8 or int4."
            )

    def _now(self, moment: Moment) -> Compressor:
        return self.first if moment.step < self.steps else self.inner

    def _state_now(self, state: BucketState) -> BucketState:
        if state.moment.step >= self.steps:
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
