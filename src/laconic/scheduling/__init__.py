"""IN WHAT ORDER tensors are exchanged. One file per method; its registration is its entry in the list below."""

from laconic.registry import Registry
from laconic.scheduling.contract import Schedule
from laconic.scheduling.fusion import Fusion
from laconic.scheduling.sequential import Sequential
from laconic.scheduling.wfbp import Wfbp

SCHEDULES: Registry[Schedule] = Registry("scheduling", Schedule, [Sequential, Wfbp, Fusion])

__all__ = ["SCHEDULES", "Fusion", "Schedule", "Sequential", "Wfbp"]
