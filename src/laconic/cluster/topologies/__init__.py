"""How hosts are connected. One file per topology; the list below registers it."""

from laconic.cluster.topologies.bcube import BCube
from laconic.cluster.topologies.contract import Messages, Paths, Ports, Topology
from laconic.cluster.topologies.dragonfly import Dragonfly
from laconic.cluster.topologies.fat_tree import FatTree
from laconic.cluster.topologies.racks import Racks
from laconic.cluster.topologies.rail import Rail
from laconic.cluster.topologies.switch import Switch
from laconic.cluster.topologies.torus import Torus

TOPOLOGIES: dict[str, type[Topology]] = {
    topology.kind: topology for topology in (Switch, Racks, FatTree, Torus, Rail, Dragonfly, BCube)
}
"""By name."""

__all__ = [
    "TOPOLOGIES",
    "BCube",
    "Dragonfly",
    "FatTree",
    "Messages",
    "Paths",
    "Ports",
    "Racks",
    "Rail",
    "Switch",
    "Topology",
    "Torus",
]
