"""A graph of tasks on a virtual clock: computations, dependencies, and transfers that share the links of a fabric."""

from laconic.simulator.engine.collective_flows import add_collective
from laconic.simulator.engine.event_loop import run
from laconic.simulator.engine.graph import NOWHERE, Graph, GraphBuilder
from laconic.simulator.engine.outcome import Outcome

__all__ = ["NOWHERE", "Graph", "GraphBuilder", "Outcome", "add_collective", "run"]
