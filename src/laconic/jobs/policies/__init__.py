"""Policies: which jobs get GPUs in the next round. One file per policy; the list below registers it."""

from __future__ import annotations

from laconic.errors import SyntaxProblem, one_line
from laconic.grammar import parse_text
from laconic.jobs.policies.allox import AlloX
from laconic.jobs.policies.cassini import Cassini
from laconic.jobs.policies.contract import Chooser, Policy, Turn, View
from laconic.jobs.policies.fifo import Fifo
from laconic.jobs.policies.finish_time_fairness import FinishTimeFairness
from laconic.jobs.policies.las import Las
from laconic.jobs.policies.max_min_fairness import MaxMinFairness
from laconic.jobs.policies.max_sum_throughput import MaxSumThroughput
from laconic.jobs.policies.min_total_duration import MinTotalDuration
from laconic.jobs.policies.pollux import Pollux
from laconic.jobs.policies.rack_aware import RackAware
from laconic.jobs.policies.srsf import Srsf
from laconic.jobs.policies.srtf import Srtf
from laconic.jobs.policies.strategy_aware import StrategyAware
from laconic.registry import Registry

POLICIES: Registry[Policy] = Registry(
    "policy",
    Policy,
    [
        Fifo,
        Srtf,
        Srsf,
        Las,
        MaxMinFairness,
        FinishTimeFairness,
        MaxSumThroughput,
        MinTotalDuration,
        AlloX,
        Pollux,
        RackAware,
        Cassini,
        StrategyAware,
    ],
)
"""Every policy by name."""

__all__ = ["POLICIES", "Chooser", "Policy", "Turn", "View", "parse_policy"]


def parse_policy(text: str) -> Policy:
    """A policy from text such as srtf or las(queues=3, placement=racks)."""
    axes = parse_text(text)
    if len(axes) != 1 or len(axes[0]) != 1:
        raise SyntaxProblem(
            f'policy "{one_line(text, 60)}" must be one name with its settings in brackets, e.g. las(queues=3).'
        )
    call = axes[0][0]
    method = POLICIES.lookup(call.name)
    settings: dict[str, object] = {}
    for key, value in call.arguments:
        if key is None:
            raise SyntaxProblem(f'policy "{one_line(text, 60)}": write settings as name=value.')
        settings[key] = value if isinstance(value, str) else str(value)
    return method.build(settings)
