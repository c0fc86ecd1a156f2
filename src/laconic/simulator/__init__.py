"""Runs a Strategy on a virtual clock: the plan the runtime executes, over a workload and a cluster as data."""

from laconic.simulator.prediction import Prediction
from laconic.simulator.simulation import Conditions, Simulation, simulate

__all__ = ["Conditions", "Prediction", "Simulation", "simulate"]
