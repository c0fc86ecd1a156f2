"""WITH WHOM a replica averages. One file per method; its registration is its entry in the list below."""

from laconic.architecture.all_reduce import AllReduce
from laconic.architecture.choco import Choco
from laconic.architecture.contract import Architecture
from laconic.architecture.gossip import Gossip
from laconic.architecture.parameter_server import ParameterServer
from laconic.architecture.push_sum import PushSum
from laconic.architecture.servers.layout import ServerLayout
from laconic.architecture.sharded import Sharded
from laconic.registry import Registry

ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture", Architecture, [AllReduce, ParameterServer, Gossip, PushSum, Choco, Sharded]
)

__all__ = [
    "ARCHITECTURES",
    "AllReduce",
    "Architecture",
    "Choco",
    "Gossip",
    "ParameterServer",
    "PushSum",
    "ServerLayout",
    "Sharded",
]
