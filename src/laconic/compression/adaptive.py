"""Compress more while gradients hardly change, and less while they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laconic.compression.families.by_step import ByStep
from laconic.compression.traits import Traits
from laconic.core.exchange import Exchange, Group, Round, round_sent
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState, Resize
from laconic.core.transport import DoneWork
from laconic.settings import count, number

_SUM = "adaptive.sum"
_NORMS = "adaptive.norms"


@dataclass(frozen=True, kw_only=True)
class Adaptive(ByStep):
    """Use `first` in critical phases, in which the norm of the gradient changes fast, and the wrapped method in others.

        D_w = sum of the results of the rounds in window w,   window = `period` rounds
        critical in window w + 1 if | |D_w| - |D_(w-1)| | >= change * |D_(w-1)|

    The first two windows are critical, and so is a window after a sum that is zero or not finite. All ranks have
    received the same sums, so they decide equally without communication. The residual of error_feedback arrives later
    in the same sum, so the degree of compression hardly affects its norm. All parameters of a bucket share one
    decision. The published method also ends a phase where the learning rate falls, which a compressor does not see.

    Reference: Agarwal et al. 2021 (Accordion), arXiv:2010.16248.
    """

    name: ClassVar[str] = "adaptive"
    good_for: ClassVar[str] = "strong compression with less of it while gradients change fast"
    needs_loss: ClassVar[bool] = True
    # Both follow from sums that all ranks have received.
    on_resize: ClassVar[Mapping[str, Resize]] = {_SUM: "copy", _NORMS: "copy"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_SUM, _NORMS})

    change: float = number(0.5, above=0.0)
    """A phase is critical if the norm changes from window to window by at least this share of the earlier norm."""
    period: int = count(100, at_least=1)
    """Exchanges in a window."""

    def traits_around(self, inner: Traits) -> Traits:
        """The compressor depends on earlier sums, so a receiver without them cannot decode."""
        first = self.first.traits
        return replace(
            super().traits_around(inner),
            unbiased=inner.unbiased and (first.unbiased or first.lossless),
            wants_error_feedback=inner.wants_error_feedback or first.wants_error_feedback,
            payloads_add_up=False,
            decodes_alone=False,
            needs_whole_tensors=True,
            exact_bytes=False,
        )

    def init(self, bucket: Bucket) -> BucketState:
        """A sum and two norms of zero, and the inner state."""
        state = self.inner.init(bucket)
        wide = torch.promote_types(bucket.dtype, torch.float32)
        state.flat[_SUM] = torch.zeros(bucket.numel, dtype=wide, device=bucket.device)
        state.whole[_NORMS] = {
            tensor.name: torch.zeros(2, dtype=wide.to_real(), device=bucket.device) for tensor in bucket.tensors
        }
        return state

    def is_first_in(self, state: BucketState) -> bool:
        """Whether this is a critical phase for the bucket."""
        norms = list(state.whole[_NORMS].values())
        # On a GPU the host waits here: it must know which compressor to use.
        before, last = torch.stack(norms).square().sum(0).sqrt().tolist()
        # Not ">=", so that values that are not finite count as critical.
        return not (before > 0 and abs(last - before) < self.change * before)

    def rounds(self, bucket: Bucket, moment: Moment) -> tuple[Round, ...]:
        """The rounds of the compressor that sends more, as a bound."""
        return max(
            (method.rounds(bucket, moment) for method in (self.first, self.inner)),
            key=lambda rounds: sum(round_sent(round, moment.world_size) for round in rounds),
        )

    def num_waits(self, bucket: Bucket, moment: Moment) -> int:
        """The larger number of the two compressors."""
        return max(method.num_waits(bucket, moment) for method in (self.first, self.inner))

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        """Exchange with the compressor of this phase; then add up the results."""
        waits = 0
        for work in super().exchange(flat, state, group, own):
            yield work
            waits += 1
        # All exchanges of a bucket have the same number of waits in every phase.
        for _ in range(self.num_waits(state.bucket, state.moment) - waits):
            yield DoneWork()
        state.flat[_SUM] += flat
        if (state.moment.round + 1) % self.period == 0:
            self._close_window(state)

    def _close_window(self, state: BucketState) -> None:
        total = state.flat[_SUM]
        for tensor, place in state.bucket.segments():
            norms = state.whole[_NORMS][tensor.name]
            norms[0] = norms[1]
            norms[1] = torch.linalg.vector_norm(total[place])
        total.zero_()
