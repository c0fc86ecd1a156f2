"""The planner inside the scheduler: the strategy of a job depends on the other jobs on its links.

For every round each job on several hosts takes the strategy with the least

    step time under the present load x steps to the same loss

Step times follow from contention.py, steps from the losses in laconic.losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.jobs.policies.network_aware import NetworkAware


@dataclass(frozen=True, kw_only=True)
class StrategyAware(NetworkAware):
    """Like cassini, and each job's strategy is chosen for the current load of its links."""

    name: ClassVar[str] = "strategy_aware"
    interleaves: ClassVar[bool] = True
    chooses_strategies: ClassVar[bool] = True
