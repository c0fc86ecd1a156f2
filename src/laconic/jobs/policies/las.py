"""Least attained service: a policy that needs no durations.

    service = GPUs x time received,    queue = number of thresholds that the service has passed

Queues with lower numbers first, within a queue in order of arrival.

Reference: Gu et al. 2019 (Tiresias), NSDI; discretized two-dimensional least attained service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.ranked import RankedPolicy
from laconic.settings import count, number


@dataclass(frozen=True, kw_only=True)
class Las(RankedPolicy):
    """Least attained service first (Tiresias): jobs move to queues of lower priority as they receive GPU time."""

    name: ClassVar[str] = "las"

    queues: int = count(2, at_least=1, at_most=32)
    """Number of queues."""
    threshold: float = number(3600.0, above=0.0)
    """GPU-seconds in the first queue; each later one holds ten times as many."""

    def keys(self, view: View) -> Floats:
        service = view.gpus * view.received_s
        edges = self.threshold * 10.0 ** np.arange(self.queues - 1)
        return np.searchsorted(edges, service, side="right").astype(np.float64)
