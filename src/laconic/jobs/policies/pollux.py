"""Goodput: elastic jobs get GPUs where these speed up training most.

    goodput(g) = samples per second on g GPUs x (noise + 1) / (noise + g / g0)

g0 is the number of GPUs a job asks for; the second factor is the progress per sample, which falls with larger batches,
and `noise` is the gradient noise scale in batches. Every job first gets its least number of GPUs, in order of arrival;
each further GPU goes to the elastic job whose goodput grows most in proportion. A job that is not elastic gets what it
asks for or nothing.

Reference: Qiao et al. 2021 (Pollux), arXiv:2008.12260.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from laconic.jobs.job import Job
from laconic.jobs.policies.contract import Chooser, Policy, Turn, View
from laconic.settings import number

_WORTH = 1.02
"""A GPU that gains less than this is left free."""


@dataclass(frozen=True, kw_only=True)
class Pollux(Policy):
    """GPUs go to the elastic jobs that gain the most progress from them; their number adapts to the load."""

    name: ClassVar[str] = "pollux"

    noise: float = number(8.0, above=0.0)
    """Gradient noise scale, in batches on the number of GPUs the job asks for."""

    def start(self) -> Chooser:
        return _ByGoodput(self)

    def speed(self, job: Job, gpus: int) -> float:
        return job.speed_on(gpus) * (self.noise + 1) / (self.noise + max(1.0, gpus / job.gpus))


@dataclass(eq=False)
class _ByGoodput:
    policy: Pollux
    gpus: dict[int, int] = field(default_factory=dict)

    def choose(self, view: View) -> Turn:
        numbers = view.number.tolist()
        # Restarts cost time: numbers of GPUs change only when jobs arrive or end.
        if view.has_changed or not self.gpus:
            self.gpus = self._allotted(view, numbers)
        gpus = np.fromiter((self.gpus[number] for number in numbers), dtype=np.int64, count=len(numbers))
        return Turn(np.lexsort((view.number, gpus == 0)), gpus)

    def _allotted(self, view: View, numbers: list[int]) -> dict[int, int]:
        left = view.num_gpus
        found: dict[int, int] = {}
        heap: list[tuple[float, int]] = []
        for place in np.lexsort((view.number, -view.age_s)).tolist():
            job = view.jobs[numbers[place]]
            least = 1 if job.max_gpus else job.gpus
            found[numbers[place]] = least if least <= left else 0
            left -= found[numbers[place]]
            if job.max_gpus and found[numbers[place]]:
                self._offer(heap, job, numbers[place], least)
        while left and heap:
            gain, taker = heapq.heappop(heap)
            if -gain < _WORTH:
                break
            found[taker] += 1
            left -= 1
            self._offer(heap, view.jobs[taker], taker, found[taker])
        return found

    def _offer(self, heap: list[tuple[float, int]], job: Job, taker: int, gpus: int) -> None:
        if gpus < job.most_gpus:
            gain = self.policy.speed(job, gpus + 1) / self.policy.speed(job, gpus)
            heapq.heappush(heap, (-gain, taker))
