"""Adam whose momentum is exchanged in one bit per value, once its second moment has settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange
from laconic.core.stateful import BucketState, Resize
from laconic.synchronization.contract import Average
from laconic.synchronization.families.shared_variance import SharedVariance

_MOMENTUM = "onebit_adam.momentum"


@dataclass(frozen=True, kw_only=True)
class OnebitAdam(SharedVariance):
    """Average gradients at first; then average Adam's momentum, compressed, with a variance that hardly changes.

        step < T    g <- mean_i(C_first(g_i)),   Adam as it is
        from T on   m_i = b1 m + (1 - b1) g_i,   m <- mean_i(C(m_i)),   x <- x - lr m / (sqrt(v) + eps)
        refresh     g <- mean_i(C_first(g_i)),   m <- b1 m + (1 - b1) g,   v <- (1 - w) v + w g^2

    C is the compressor of the strategy; left off, one bit with error feedback. With error feedback the sent values add
    up to the computed ones, which is correct for a momentum that is applied directly, but not for a gradient that Adam
    divides by its running size. T = warmup_share * total_steps; v is refreshed whenever the number of steps has grown
    by refresh_share, w = (1 - b2) / (1 - b2^k) for the k-th gradient that it takes in, and at T no element of it is
    below `floor` times the mean of its tensor. The optimizer stays Adam or AdamW; laconic sets its m and v.

    Between refreshes .grad holds the momentum, which clip_grad_norm_ then clips.

    Reference: Tang et al. 2021, arXiv:2102.02888 (without refresh); Lu et al. 2022, arXiv:2202.06009 (with it).
    """

    name: ClassVar[str] = "onebit_adam"
    replicas_identical: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, Resize]] = {_MOMENTUM: "copy"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_MOMENTUM})

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Average the gradient, or replace it by the mean momentum."""
        moment = state.moment
        if self.begins(moment.step):
            yield from average(flat, None)
            return
        momentum, beta = state.flat[_MOMENTUM], moment.momentum
        # Gradients are scaled by 1/n, and so must be the values added to them.
        flat.mul_(1.0 - beta).add_(momentum, alpha=beta / moment.world_size)
        yield from average(flat, None)
        # Values that are not finite reach all ranks: a GradScaler skips the step, and the momentum stays.
        momentum.copy_(torch.where(torch.isfinite(flat), flat, momentum))
