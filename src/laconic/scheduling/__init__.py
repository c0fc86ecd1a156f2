"""IN WHAT ORDER tensors are exchanged. One file per method; the list below registers it."""

from laconic.registry import Registry
from laconic.scheduling.contract import Schedule
from laconic.scheduling.dear import Dear
from laconic.scheduling.fusion import Fusion
from laconic.scheduling.mg_wfbp import MgWfbp
from laconic.scheduling.priority import Priority
from laconic.scheduling.sequential import Sequential
from laconic.scheduling.wfbp import Wfbp

SCHEDULES: Registry[Schedule] = Registry("scheduling", Schedule, [Sequential, Wfbp, Fusion, MgWfbp, Priority, Dear])

__all__ = ["SCHEDULES", "Dear", "Fusion", "MgWfbp", "Priority", "Schedule", "Sequential", "Wfbp"]
