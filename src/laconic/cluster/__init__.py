"""Clusters as data: hosts, devices, links and topologies, and the measurements of a probe."""

from laconic.cluster.cluster import MOST_HOSTS, Cluster
from laconic.cluster.fabric import Fabric
from laconic.cluster.link import Link, parse_bandwidth
from laconic.cluster.measured import Curve, Estimate, Measured
from laconic.cluster.presets import PRESETS, Preset, cluster
from laconic.cluster.topologies import TOPOLOGIES, BCube, Dragonfly, FatTree, Racks, Rail, Switch, Topology, Torus

__all__ = [
    "MOST_HOSTS",
    "PRESETS",
    "TOPOLOGIES",
    "BCube",
    "Cluster",
    "Curve",
    "Dragonfly",
    "Estimate",
    "Fabric",
    "FatTree",
    "Link",
    "Measured",
    "Preset",
    "Racks",
    "Rail",
    "Switch",
    "Topology",
    "Torus",
    "cluster",
    "parse_bandwidth",
]
