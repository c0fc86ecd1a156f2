"""WITH WHOM a replica averages. One file per method; its registration is its entry in the list below."""

from laconic.architecture.all_reduce import AllReduce
from laconic.architecture.contract import Architecture
from laconic.registry import Registry

ARCHITECTURES: Registry[Architecture] = Registry("architecture", Architecture, [AllReduce])

__all__ = ["ARCHITECTURES", "AllReduce", "Architecture"]
