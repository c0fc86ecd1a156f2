"""Max-min fairness: the same GPU time for every job.

    maximize  min over jobs of gpus_i x_i

With more jobs than GPUs, x_i = (GPUs / jobs) / gpus_i: a job on 4 GPUs runs a quarter as often as one on a single GPU.

The program is Gavel's for jobs that are equally fast everywhere (max_min_fairness, not its "_perf" form).

Reference: Narayanan et al. 2020 (Gavel), arXiv:2008.09213, section 4.1; Gavel's policies/max_min_fairness.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.shares import Memory, SharePolicy, center


@dataclass(frozen=True, kw_only=True)
class MaxMinFairness(SharePolicy):
    """The same GPU time for every job (Gavel)."""

    name: ClassVar[str] = "max_min_fairness"

    def shares(self, view: View, memory: Memory) -> Floats:
        level = min(1.0, view.num_gpus / len(view.gpus))
        least = level / view.gpus
        return least if level < 1 else center(least, view.gpus, view.num_gpus)
