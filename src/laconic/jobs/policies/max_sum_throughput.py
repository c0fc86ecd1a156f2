"""Maximum sum of throughputs: the jobs with the most steps per second and GPU run, the others wait.

    maximize  sum of steps_per_s_i x_i

A fractional knapsack: jobs in order of steps per second and GPU, each with x = 1, until the GPUs are used up. Steps are
those of the whole job at its present batch, not normalized by model.

The program is Gavel's (max_sum_throughput_perf). An interior-point solver gives every job that should get nothing a
share as small as its tolerance, in inverse proportion to the loss in the objective from running that job; these shares
decide which jobs get the GPUs that the others cannot use.

Reference: Narayanan et al. 2020 (Gavel), arXiv:2008.09213, section 4.2; Gavel's policies/max_sum_throughput.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.shares import Memory, SharePolicy

_TOLERANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class MaxSumThroughput(SharePolicy):
    """The most optimizer steps per second of all jobs together (Gavel)."""

    name: ClassVar[str] = "max_sum_throughput"

    def shares(self, view: View, memory: Memory) -> Floats:
        value, place = np.unique(-view.steps_per_s / view.gpus, return_inverse=True)
        # Jobs with equal values get equal shares.
        wanted = np.bincount(place, view.gpus, len(value))
        left = np.maximum(0.0, view.num_gpus - (np.cumsum(wanted) - wanted))
        share = np.minimum(1.0, left / wanted)
        last = int(np.flatnonzero(share)[-1])
        lost = (value - value[last])[place] * view.gpus
        found = share[place]
        nothing = found == 0
        if nothing.any():
            found[nothing] = _TOLERANCE * lost[nothing].min() / lost[nothing]
        return found
