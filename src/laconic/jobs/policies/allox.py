"""AlloX: the assignment of jobs to machines with the smallest sum of completion times.

    cost of job i in the k-th place from the end of a machine's queue = k x left_i + age_i

The cheapest matching of jobs with places puts the shortest jobs first. On GPUs of one type every GPU is a machine, and
the jobs at the heads of the queues are the shortest.

The paper's rule is for jobs on one GPU. For larger ones this file follows Gavel's code as Shockwave ran it:

- A job on one GPU that has been matched keeps its GPU until it ends. It takes one of the machines.
- A job on several GPUs that has been matched gets 1 / GPUs of the time until it ends and leaves its machine to others,
  so that it is matched again and again.
- Only the jobs that came first are matched: a share `considered` of those without a machine, but at least as many as
  there are machines left.

References: Le et al. 2020 (AlloX), EuroSys; Gavel's and Shockwave's policies/allox.py, where considered = 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.shares import Memory, SharePolicy
from laconic.settings import share


@dataclass(frozen=True, kw_only=True)
class AlloX(SharePolicy):
    """The smallest sum of completion times without taking the GPU from a job on one GPU that has begun."""

    name: ClassVar[str] = "allox"

    considered: float = share(0.2)
    """Share of the waiting jobs that are looked at, those that came first."""

    def shares(self, view: View, memory: Memory) -> Floats:
        numbers, gpus = view.number.tolist(), view.gpus.tolist()
        memory.matched &= set(numbers)
        waiting = [place for place, own in enumerate(numbers) if own not in memory.matched or gpus[place] > 1]
        # Services may have taken GPUs since jobs were matched.
        machines = max(0, view.num_gpus - (len(numbers) - len(waiting)))
        # Jobs are numbered in order of arrival.
        first = waiting[: max(int(self.considered * len(waiting)), machines)]
        shortest = sorted(first, key=lambda place: (view.left_s[place], place))
        memory.matched.update(numbers[place] for place in shortest[:machines])
        return np.array(
            [1 / wanted if own in memory.matched else 0.0 for own, wanted in zip(numbers, gpus, strict=True)]
        )
