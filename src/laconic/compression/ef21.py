"""Compress the difference between the gradient and the receivers' estimate of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Wrapper
from laconic.compression.traits import Traits
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize

_OWN = "ef21.own"
_ALL = "ef21.all"
_OWED = "ef21.owed"


@dataclass(frozen=True, kw_only=True)
class Ef21(Wrapper):
    """Keep an estimate of every worker's gradient, and send only corrections to it.

        c_i = C(g_i - h_i),   h_i <- h_i + c_i,   h <- h + sum_i(c_i),   h replaces the gradient

    The optimizer gets a gradient that lags behind but has no gaps. Error feedback instead sends lost values later in
    bursts, which adaptive optimizers take for large gradients. g is already divided by the number of workers, so h is
    the mean. A correction that is not finite reaches all ranks in that step, and is not kept in the estimates.

    Where each rank adds up a shard of all payloads and sends the sum compressed again, it keeps the loss of this second
    compression and adds it to the next sum.
    Estimates add up small corrections over the whole training, so 16-bit gradients are widened: estimates are kept,
    and corrections compressed and added up, in float32.

    Reference: Richtarik et al. 2021, arXiv:2106.05203.
    """

    name: ClassVar[str] = "ef21"
    good_for: ClassVar[str] = "biased methods under Adam"
    needs_loss: ClassVar[bool] = True
    needs_scale: ClassVar[bool] = True
    # Estimates of the workers add up to the common one, whoever holds them.
    on_resize: ClassVar[Mapping[str, Resize]] = {_OWN: "sum", _ALL: "copy", _OWED: "reset"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_OWN, _ALL, _OWED})

    def traits_around(self, inner: Traits) -> Traits:
        """Lost values stay in the difference from the estimate, without which a payload cannot be decoded."""
        return replace(
            inner,
            keeps_residual=True,
            estimates_all=True,
            gives_factors=False,
            wants_error_feedback=False,
            unbiased=False,
            decodes_alone=False,
            sums_only=False,
            payloads_add_up=False,
        )

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of the inner compressor for corrections."""
        return self.inner.rounds(bucket.wide, moment)

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """The waits of the inner compressor for corrections."""
        return self.inner.num_waits(bucket.wide, moment)

    def init(self, bucket: Bucket) -> BucketState:
        """Estimates of zero, and the inner state for corrections."""
        wide = bucket.wide
        fields = (_OWN, _ALL, _OWED) if self.inner.traits.sends_sums_back else (_OWN, _ALL)
        flat = {field: torch.zeros(wide.numel, dtype=wide.dtype, device=wide.device) for field in fields}
        return BucketState(bucket, flat=flat, parts=[self.inner.init(wide)])

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange the correction, and return the common estimate."""
        own_estimate, estimate, part = state.flat[_OWN], state.flat[_ALL], state.part(0)
        correction = flat.to(estimate.dtype)  # the tensor itself, unless it is widened
        correction -= own_estimate
        sent = torch.empty_like(correction)
        part.owed = owed = state.flat.get(_OWED)
        yield from self.inner.exchange(correction, part, group, sent)
        part.owed = None
        own_estimate += sent.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if own is not None:
            own.copy_(own_estimate)
        correction += estimate
        estimate.copy_(torch.where(correction.isfinite(), correction, estimate))
        if correction is not flat:
            flat.copy_(correction)
        if owed is not None:
            owed.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
