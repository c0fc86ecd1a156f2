"""WHEN replicas agree. One file per method; its registration is its entry in the list below."""

from laconic.registry import Registry
from laconic.synchronization.asp import Asp
from laconic.synchronization.bsp import Bsp
from laconic.synchronization.contract import Asynchronous, LocalUpdates, Synchronization
from laconic.synchronization.decoupled_momentum import DecoupledMomentum
from laconic.synchronization.demo import Demo
from laconic.synchronization.diloco import DiLoCo
from laconic.synchronization.local_sgd import LocalSgd
from laconic.synchronization.onebit_adam import OnebitAdam
from laconic.synchronization.slowmo import SlowMo
from laconic.synchronization.ssp import Ssp
from laconic.synchronization.streaming_diloco import StreamingDiLoCo

SYNCHRONIZATIONS: Registry[Synchronization] = Registry(
    "synchronization",
    Synchronization,
    [Bsp, Ssp, Asp, LocalSgd, SlowMo, DiLoCo, StreamingDiLoCo, DecoupledMomentum, Demo, OnebitAdam],
)

__all__ = [
    "SYNCHRONIZATIONS",
    "Asp",
    "Asynchronous",
    "Bsp",
    "DecoupledMomentum",
    "Demo",
    "DiLoCo",
    "LocalSgd",
    "LocalUpdates",
    "OnebitAdam",
    "SlowMo",
    "Ssp",
    "StreamingDiLoCo",
    "Synchronization",
]
