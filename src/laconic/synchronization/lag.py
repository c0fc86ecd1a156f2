"""Lazily aggregated gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.core.exchange import Exchange
from laconic.core.stateful import BucketState, Resize
from laconic.settings import number
from laconic.synchronization.contract import Average, Quantity, Synchronization

_SENT = "lag.sent"
_MEAN = "lag.mean"


@dataclass(frozen=True, kw_only=True)
class Lag(Synchronization):
    """Average gradients only in steps in which some worker's gradient has changed; otherwise reuse the last mean.

        exchange if |g_i - s_i|^2 > threshold |m|^2 for some worker i:   s_i <- g_i,   m <- mean_j(C(g_j))
        m takes the place of the gradient

    Each bucket decides for itself. With plain SGD the last step moved the parameters by lr m, so |m| is the length of
    that move divided by lr. A change of the gradient that is small compared with that length tells the optimizer
    little. Workers first tell each other with one number whether they want to exchange, because an all-reduce takes all
    of them; then all send their current gradients.

    For gradients of whole data sets or of very large batches. Those of small batches change completely from step to
    step, so every one is sent. Bytes depend on the gradients; the prediction is an upper bound, the bytes of an
    exchange in every step.

    Reference: Chen et al. 2018, arXiv:1805.09965 (LAG-WK with D = 1), whose workers decide one by one.
    """

    name: ClassVar[str] = "lag"
    quantity: ClassVar[Quantity] = "gradient"
    replicas_identical: ClassVar[bool] = True
    needs_everyone: ClassVar[bool] = True
    lazy: ClassVar[bool] = True
    # Gradients come scaled by 1/n, so those of all workers add up to the mean, whoever remembers them.
    fields: ClassVar[Mapping[str, Resize]] = {_SENT: "sum", _MEAN: "copy"}
    scaled_fields: ClassVar[frozenset[str]] = frozenset({_SENT, _MEAN})

    threshold: float = number(0.25, above=0.0, at_most=1.0)
    """How much a worker's gradient must have changed for all to exchange theirs: the square of the change, as a share
    of the square of the last mean."""

    def around(self, flat: torch.Tensor, state: BucketState, average: Average) -> Exchange:
        """Ask whether some worker's gradient has changed; average, or take the last mean."""
        sent, mean = state.flat[_SENT], state.flat[_MEAN]
        change = _square(flat - sent) * state.moment.world_size**2
        # Not "change > ...": what is not a number must be exchanged, for everyone to see.
        wants = (~(change <= self.threshold * _square(mean))).to(torch.float32)
        yield from average.total(wants)
        if not wants.item():
            flat.copy_(mean)
            return
        sent.copy_(flat)
        yield from average(flat, None)
        mean.copy_(flat)


def _square(values: torch.Tensor) -> torch.Tensor:
    # A sum of 16-bit squares would overflow.
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)).square()
