"""Finish-time fairness: no job ends much later than on a cluster share of its own.

    minimize  max over jobs of  rho_i = (age_i + left_i / x_i) / isolated_i
    isolated_i = sum over the past of  steps / steps per second on a share of its own  +  left_i / that share
    share of its own = min(1, GPUs / jobs / gpus_i)

For a given rho every job needs x_i = left_i / (rho isolated_i - age_i); the smallest rho that fits is found by
bisection. Where one job alone limits rho, the other shares are the middle of what is allowed.

The rule is from Themis, the optimization program from Gavel. As in Gavel's code, the steps done are the decrease in the
steps left: when a batch grows, fewer steps are left, and those that fall away count as done.

References: Mahajan et al. 2020 (Themis), arXiv:1907.01484; Narayanan et al. 2020 (Gavel), arXiv:2008.09213, section
4.2; Gavel's policies/finish_time_fairness.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.shares import Memory, SharePolicy, center

_BISECTIONS = 60
_MOST = 1e12


@dataclass(frozen=True, kw_only=True)
class FinishTimeFairness(SharePolicy):
    """The smallest delay for the job that is delayed most, compared with a share of its own (Themis)."""

    name: ClassVar[str] = "finish_time_fairness"

    def shares(self, view: View, memory: Memory) -> Floats:
        isolated_s = self._isolated_s(view, memory)

        def needed(rho: float) -> Floats:
            allowed_s = np.maximum(rho * isolated_s - view.age_s, 1e-9)
            return np.minimum(1.0, view.left_s / allowed_s)

        def fits(rho: float) -> bool:
            return float(view.gpus @ needed(rho)) <= view.num_gpus

        # No job can do better than running all the time.
        low = float(((view.age_s + view.left_s) / isolated_s).max())
        if fits(low):
            return center(needed(low), view.gpus, view.num_gpus)
        high = 2 * low
        while not fits(high) and high < _MOST:
            high *= 2
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return needed(high)

    def _isolated_s(self, view: View, memory: Memory) -> Floats:
        """The total time of each job on 1 / n of the cluster: its work so far, and the rest."""
        share = np.minimum(1.0, view.num_gpus / len(view.gpus) / view.gpus)
        steps_left, steps_per_s = view.left_s * view.steps_per_s, share * view.steps_per_s
        past_s = np.zeros(len(share))
        for place, number in enumerate(view.number.tolist()):
            left, speed = float(steps_left[place]), float(steps_per_s[place])
            before, speed_before, past_s[place] = memory.isolated.get(number, (left, speed, 0.0))
            past_s[place] += (before - left) / speed_before
            memory.isolated[number] = (left, speed, float(past_s[place]))
        return np.maximum(past_s + view.left_s / share, 1e-9)
