"""Minimum total duration: all jobs end as early as the last one can.

    minimize T  with  x_i >= left_i / T

The smallest T is the longest remaining time, or all remaining GPU-seconds divided by the number of GPUs if that is
larger. As in Gavel's code, T is found by bisection between 100 s and 1e6 s to 5%, and the shares are the middle of what
that T allows: the program that Gavel solves for T has no objective. Remaining times are those at the present batch.

Reference: Narayanan et al. 2020 (Gavel), arXiv:2008.09213, section 4.2; Gavel's policies/min_total_duration.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.shares import Memory, SharePolicy, center

_SHORTEST_S, _LONGEST_S, _CLOSE = 100.0, 1e6, 1.05


@dataclass(frozen=True, kw_only=True)
class MinTotalDuration(SharePolicy):
    """The earliest end of the last job (Gavel's makespan policy)."""

    name: ClassVar[str] = "min_total_duration"

    def shares(self, view: View, memory: Memory) -> Floats:
        least_s = max(float(view.left_s.max()), float(view.gpus @ view.left_s) / view.num_gpus)
        low, high = _SHORTEST_S, max(_LONGEST_S, least_s)
        while high > low * _CLOSE:
            middle = (low + high) / 2
            low, high = (low, middle) if middle >= least_s else (middle, high)
        return center(np.minimum(1.0, view.left_s / high), view.gpus, view.num_gpus)
