"""WHEN replicas agree. One file per method; its registration is its entry in the list below."""

from laconic.registry import Registry
from laconic.synchronization.bsp import Bsp
from laconic.synchronization.contract import Synchronization

SYNCHRONIZATIONS: Registry[Synchronization] = Registry("synchronization", Synchronization, [Bsp])

__all__ = ["SYNCHRONIZATIONS", "Bsp", "Synchronization"]
