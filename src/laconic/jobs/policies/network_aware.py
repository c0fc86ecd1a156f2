"""The common base of policies that know the network.

The GPUs of a job stay close together, and jobs move to that end (jobs/moving.py). The order is that of srsf, with the
time that links cost included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.cluster.fabric import Floats
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.ranked import RankedPolicy
from laconic.settings import choice


@dataclass(frozen=True, kw_only=True)
class NetworkAware(RankedPolicy):
    """Shortest remaining service first, at the speed that links allow."""

    migrates: ClassVar[bool] = True

    placement: str = choice("racks", "pack", "first", "spread")
    """How hosts are chosen for a job: racks, pack, first or spread."""

    def keys(self, view: View) -> Floats:
        return view.gpus * view.left_s / view.speed
