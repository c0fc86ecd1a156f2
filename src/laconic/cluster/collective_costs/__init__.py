"""The cost of collective operations between GPUs, from measured tables: start-up, ramp and plateau.

This package lies below the simulator, so that training, planning and serving take their times from one place.
"""

from laconic.cluster.collective_costs.between_nodes import NodeLink
from laconic.cluster.collective_costs.costs import CollectiveCosts, CollectiveTime
from laconic.cluster.collective_costs.curve import SizeCurve
from laconic.cluster.collective_costs.expert_all_to_all import ExpertAllToAll, Routing
from laconic.cluster.collective_costs.operations import OPERATIONS, Operation
from laconic.cluster.collective_costs.systems import System, system, system_names

__all__ = [
    "OPERATIONS",
    "CollectiveCosts",
    "CollectiveTime",
    "ExpertAllToAll",
    "NodeLink",
    "Operation",
    "Routing",
    "SizeCurve",
    "System",
    "system",
    "system_names",
]
