"""WHEN replicas agree. One file per method; the list below registers it."""

from laconic.registry import Registry
from laconic.synchronization.adacomm import AdaComm
from laconic.synchronization.asp import Asp
from laconic.synchronization.async_diloco import AsyncDiLoCo
from laconic.synchronization.backup import Backup
from laconic.synchronization.bsp import Bsp
from laconic.synchronization.contract import Asynchronous, LocalUpdates, Pace, Synchronization
from laconic.synchronization.decoupled_momentum import DecoupledMomentum
from laconic.synchronization.delayed import Delayed
from laconic.synchronization.demo import Demo
from laconic.synchronization.des_loc import DesLoc
from laconic.synchronization.diloco import DiLoCo
from laconic.synchronization.dion import Dion
from laconic.synchronization.dssp import Dssp
from laconic.synchronization.easgd import Easgd
from laconic.synchronization.fedprox import FedProx
from laconic.synchronization.lag import Lag
from laconic.synchronization.local_sgd import LocalSgd
from laconic.synchronization.noloco import NoLoCo
from laconic.synchronization.onebit_adam import OnebitAdam
from laconic.synchronization.scaffold import Scaffold
from laconic.synchronization.slowmo import SlowMo
from laconic.synchronization.ssp import Ssp
from laconic.synchronization.streaming_diloco import StreamingDiLoCo
from laconic.synchronization.zero_one_adam import ZeroOneAdam

SYNCHRONIZATIONS: Registry[Synchronization] = Registry(
    "synchronization",
    Synchronization,
    [
        Bsp,
        Lag,
        Ssp,
        Dssp,
        Asp,
        Backup,
        AsyncDiLoCo,
        LocalSgd,
        AdaComm,
        Delayed,
        Easgd,
        FedProx,
        Scaffold,
        SlowMo,
        DiLoCo,
        StreamingDiLoCo,
        NoLoCo,
        DecoupledMomentum,
        DesLoc,
        Demo,
        Dion,
        OnebitAdam,
        ZeroOneAdam,
    ],
)

__all__ = [
    "SYNCHRONIZATIONS",
    "AdaComm",
    "Asp",
    "AsyncDiLoCo",
    "Asynchronous",
    "Backup",
    "Bsp",
    "DecoupledMomentum",
    "Delayed",
    "Demo",
    "DesLoc",
    "DiLoCo",
    "Dion",
    "Dssp",
    "Easgd",
    "FedProx",
    "Lag",
    "LocalSgd",
    "LocalUpdates",
    "NoLoCo",
    "OnebitAdam",
    "Pace",
    "Scaffold",
    "SlowMo",
    "Ssp",
    "StreamingDiLoCo",
    "Synchronization",
    "ZeroOneAdam",
]
