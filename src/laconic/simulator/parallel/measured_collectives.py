"""Measured collectives of known nodes, which fabric.py takes in place of its formulas.

A table is used where the accelerator and the link inside a node are those of a measured system, for groups inside one
node; the network between nodes follows from its NICs, as everywhere. Tables have 2 and 4 GPUs: other
numbers, and sizes beyond 512 MiB, are extrapolated (cluster/collective_costs), and extrapolations.py warns of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from laconic.cluster import Link
from laconic.cluster.collective_costs import CollectiveCosts

_SYSTEMS: Mapping[tuple[str, float], str] = {
    ("A100 80 GB", 2400e9): "a100_sxm",
    ("H100", 3600e9): "h100_sxm",
    ("H200", 3600e9): "h200_sxm",
}
"""Accelerator and rate of a GPU's links inside a node, one way in bits per second -> the measured system."""


def measured_system(accelerator: str, inside: Link | None) -> str:
    """The system whose table describes such nodes; "" if there is none."""
    return "" if inside is None else _SYSTEMS.get((accelerator, inside.bandwidth_bps), "")


@cache
def measured_costs(system: str) -> CollectiveCosts:
    """The table of a system, read once."""
    return CollectiveCosts(system)


def measured_s(system: str, operation: str, nbytes: float, gpus: int) -> float:
    """Seconds of one operation among GPUs of one node."""
    return measured_costs(system).seconds(operation, nbytes, gpus)
