"""Compress the difference between each worker's gradient and a slowly learned shift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.contract import Compressor, Wrapper
from laconic.compression.traits import Traits
from laconic.core.exchange import Exchange, Group, Round
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.settings import number

_OWN = "diana.own"
_ALL = "diana.all"


@dataclass(frozen=True, kw_only=True)
class Diana(Wrapper):
    """Keep a shift that follows every worker's gradient, and send only the difference from it.

        c_i = C(g_i - h_i),   decoded = h + sum_i c_i,   h_i <- h_i + rate c_i,   h <- h + rate sum_i c_i

    C must be unbiased. Its noise is proportional to its input, so it vanishes as h_i approaches g_i, even where the
    workers' gradients do not vanish: with non-IID data these stay large at the optimum. g is divided by the number of
    workers, so h is the mean of the shifts. The best rate is 1 / (1 + w), where w is the ratio of C's squared noise to
    the squared signal; a rate far above that does not converge. A correction that is not finite reaches all ranks in
    that step, and is not kept in the shifts. 16-bit gradients are widened: shifts are kept, and corrections compressed
    and added up, in float32.

    Reference: Mishchenko et al. 2019, arXiv:1901.09269; Horvath et al. 2019, arXiv:1904.05115.
    """

    name: ClassVar[str] = "diana"
    good_for: ClassVar[str] = "unbiased methods where workers hold non-IID data"
    needs_loss: ClassVar[bool] = True
    needs_unbiased: ClassVar[bool] = True
    # The loss of a second compression of sums would accumulate in the common shift.
    gathers: ClassVar[bool] = True
    # Shifts of the workers add up to the common one, whichever worker holds them.
    on_resize: ClassVar[Mapping[str, Resize]] = {_OWN: "sum", _ALL: "copy"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_OWN, _ALL})

    rate: float = number(0.25, above=0.0, at_most=1.0)
    """The share of each correction that is added to the shifts."""

    def traits_around(self, inner: Traits) -> Traits:
        """A payload cannot be decoded without the shift."""
        return replace(
            inner,
            estimates_all=True,
            gives_factors=False,
            decodes_alone=False,
            sums_only=False,
            payloads_add_up=False,
            sends_sums_back=False,
        )

    @property
    def _gathered(self) -> Compressor:
        return self.inner.one_by_one()

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of the inner compressor where payloads are gathered."""
        return self._gathered.rounds(bucket.wide, moment)

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """The waits of the inner compressor where payloads are gathered."""
        return self._gathered.num_waits(bucket.wide, moment)

    def init(self, bucket: Bucket) -> BucketState:
        """Shifts of zero, and the inner state for corrections."""
        wide = bucket.wide
        flat = {field: torch.zeros(wide.numel, dtype=wide.dtype, device=wide.device) for field in (_OWN, _ALL)}
        return BucketState(bucket, flat=flat, parts=[self._gathered.init(wide)])

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange the correction and add the common shift."""
        own_shift, shift = state.flat[_OWN], state.flat[_ALL]
        correction = flat.to(shift.dtype)  # the tensor itself, unless it is widened
        correction -= own_shift
        sent = torch.empty_like(correction)
        yield from self._gathered.exchange(correction, state.part(0), group, sent)
        if own is not None:
            own.copy_(own_shift + sent)
        learned = correction.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        correction += shift
        if correction is not flat:
            flat.copy_(correction)
        own_shift.add_(sent.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), alpha=self.rate)
        shift.add_(learned, alpha=self.rate)
