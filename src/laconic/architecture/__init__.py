"""WITH WHOM a replica averages. One file per method; the list below registers it."""

from laconic.architecture.all_reduce import AllReduce
from laconic.architecture.bounded_loss import BoundedLoss
from laconic.architecture.choco import Choco
from laconic.architecture.contract import Architecture
from laconic.architecture.gossip import Gossip
from laconic.architecture.in_network import InNetwork
from laconic.architecture.parameter_server import ParameterServer
from laconic.architecture.power_gossip import PowerGossip
from laconic.architecture.push_sum import PushSum
from laconic.architecture.servers.layout import ServerLayout
from laconic.architecture.sharded import Sharded
from laconic.registry import Registry

ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture",
    Architecture,
    [AllReduce, ParameterServer, InNetwork, BoundedLoss, Gossip, PushSum, Choco, PowerGossip, Sharded],
)

__all__ = [
    "ARCHITECTURES",
    "AllReduce",
    "Architecture",
    "BoundedLoss",
    "Choco",
    "Gossip",
    "InNetwork",
    "ParameterServer",
    "PowerGossip",
    "PushSum",
    "ServerLayout",
    "Sharded",
]
