"""Shortest remaining service first: the job whose remaining work needs the least GPU time.

    service = GPUs x time for the rest

On GPUs that are used one by one this is Smith's rule for the mean completion time: a job on four GPUs delays four times
as many others.

Reference: Gu et al. 2019 (Tiresias), NSDI, where it is the order for jobs whose length is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.ranked import RankedPolicy


@dataclass(frozen=True, kw_only=True)
class Srsf(RankedPolicy):
    """First the job whose remaining work needs the least GPU time (Tiresias)."""

    name: ClassVar[str] = "srsf"

    def keys(self, view: View) -> Floats:
        return view.gpus * view.left_s
