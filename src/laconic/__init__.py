"""laconic: PyTorch training where the network is the bottleneck.

with laconic.attach(model, optimizer, "bsp / all_reduce / bf16 / fusion(25MiB)"):
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from laconic.core.event import Event, EventList, EventLog, EventSink, EventTee
from laconic.errors import (
    AttachError,
    CheckpointError,
    CommunicationError,
    ConfigurationError,
    FrameRefused,
    IllegalCombination,
    InvalidSetting,
    LaconicError,
    LaconicWarning,
    MethodError,
    PeerLost,
    StrategyError,
    SyntaxProblem,
    UnknownName,
    UnsupportedGradient,
    UsageError,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from laconic.architecture import (
        AllReduce,
        Architecture,
        BoundedLoss,
        Choco,
        Gossip,
        InNetwork,
        ParameterServer,
        PowerGossip,
        PushSum,
        Sharded,
    )
    from laconic.auto import Auto, attach
    from laconic.compression import (
        AcpSgd,
        AdaComp,
        Adaptive,
        Atomo,
        Bf16,
        Chain,
        Cocktail,
        Compressor,
        DctCyclic,
        DctTopK,
        Dgc,
        Diana,
        Ef21,
        EfSignSgd,
        Elias,
        ErrorFeedback,
        Fp8,
        Fp16,
        GTopK,
        Int4,
        Int8,
        IntSgd,
        MomentumCorrection,
        Natural,
        NoCompression,
        NuqSgd,
        OkTopK,
        OneBit,
        Packed,
        PerLayer,
        PowerSgd,
        Qsgd,
        RandomK,
        ScaleCom,
        Sidco,
        SignSgd,
        Sketch,
        TernGrad,
        Thc,
        Threshold,
        TopK,
        TwoBit,
        Warmup,
        Wrapper,
    )
    from laconic.compression.traits import Traits
    from laconic.core.in_process import InProcessCluster
    from laconic.core.moment import Moment
    from laconic.core.plan import Bucket, Plan
    from laconic.core.stateful import BucketState
    from laconic.core.tensor import TensorSpec
    from laconic.core.transport import Transport
    from laconic.runtime import Elastic, Session, ViewChange, redistribute
    from laconic.scheduling import (
        Dear,
        Fusion,
        MgWfbp,
        Priority,
        Schedule,
        Sequential,
        Wfbp,
    )
    from laconic.sinks import MlflowSink, PrometheusSink, StepValues, TensorBoardSink, TrackerSink, WandbSink
    from laconic.strategy import Strategy
    from laconic.synchronization import (
        AdaComm,
        Asp,
        AsyncDiLoCo,
        Backup,
        Bsp,
        DecoupledMomentum,
        Delayed,
        Demo,
        DesLoc,
        DiLoCo,
        Dion,
        Dssp,
        Easgd,
        FedProx,
        Lag,
        LocalSgd,
        LocalUpdates,
        NoLoCo,
        OnebitAdam,
        Scaffold,
        SlowMo,
        Ssp,
        StreamingDiLoCo,
        Synchronization,
        ZeroOneAdam,
    )
else:
    _NAMES = {
        "laconic.architecture": (
            "AllReduce Architecture BoundedLoss Choco Gossip InNetwork ParameterServer PowerGossip PushSum Sharded"
        ),
        "laconic.compression": (
            "AcpSgd AdaComp Adaptive Atomo Bf16 Chain Cocktail Compressor DctCyclic DctTopK Dgc Diana Ef21 EfSignSgd "
            "Elias ErrorFeedback Fp16 Fp8 GTopK Int4 Int8 IntSgd MomentumCorrection Natural NoCompression "
            "NuqSgd OkTopK OneBit Packed PerLayer PowerSgd Qsgd RandomK ScaleCom Sidco SignSgd Sketch "
            "TernGrad Thc Threshold TopK TwoBit Warmup Wrapper"
        ),
        "laconic.compression.traits": "Traits",
        "laconic.core.in_process": "InProcessCluster",
        "laconic.core.moment": "Moment",
        "laconic.core.plan": "Bucket Plan",
        "laconic.core.stateful": "BucketState",
        "laconic.core.tensor": "TensorSpec",
        "laconic.core.transport": "Transport",
        "laconic.auto": "Auto attach",
        "laconic.runtime": "Elastic Session ViewChange redistribute",
        "laconic.scheduling": "Dear Fusion MgWfbp Priority Schedule Sequential Wfbp",
        "laconic.sinks": "MlflowSink PrometheusSink StepValues TensorBoardSink TrackerSink WandbSink",
        "laconic.strategy": "Strategy",
        "laconic.synchronization": (
            "AdaComm Asp AsyncDiLoCo Backup Bsp DecoupledMomentum Delayed Demo DesLoc DiLoCo Dion Dssp Easgd FedProx "
            "Lag LocalSgd LocalUpdates NoLoCo OnebitAdam Scaffold SlowMo Ssp StreamingDiLoCo Synchronization "
            "ZeroOneAdam"
        ),
    }
    """The public names of each module that is imported when one of them is first used."""
    _HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        """Import a public name, or a subpackage such as `laconic.runtime`, when it is first used.

        torch takes seconds to import, and the command line imports this package also to print a help text.
        """
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"laconic.{name}") is not None:
            value = importlib.import_module(f"laconic.{name}")
        else:
            raise AttributeError(f"module 'laconic' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AcpSgd",
    "AdaComm",
    "AdaComp",
    "Adaptive",
    "AllReduce",
    "Architecture",
    "Asp",
    "AsyncDiLoCo",
    "Atomo",
    "AttachError",
    "Auto",
    "Backup",
    "Bf16",
    "BoundedLoss",
    "Bsp",
    "Bucket",
    "BucketState",
    "Chain",
    "CheckpointError",
    "Choco",
    "Cocktail",
    "CommunicationError",
    "Compressor",
    "ConfigurationError",
    "DctCyclic",
    "DctTopK",
    "Dear",
    "DecoupledMomentum",
    "Delayed",
    "Demo",
    "DesLoc",
    "Dgc",
    "DiLoCo",
    "Diana",
    "Dion",
    "Dssp",
    "Easgd",
    "Ef21",
    "EfSignSgd",
    "Elastic",
    "Elias",
    "ErrorFeedback",
    "Event",
    "EventList",
    "EventLog",
    "EventSink",
    "EventTee",
    "FedProx",
    "Fp8",
    "Fp16",
    "FrameRefused",
    "Fusion",
    "GTopK",
    "Gossip",
    "IllegalCombination",
    "InNetwork",
    "InProcessCluster",
    "Int4",
    "Int8",
    "IntSgd",
    "InvalidSetting",
    "LaconicError",
    "LaconicWarning",
    "Lag",
    "LocalSgd",
    "LocalUpdates",
    "MethodError",
    "MgWfbp",
    "MlflowSink",
    "Moment",
    "MomentumCorrection",
    "Natural",
    "NoCompression",
    "NoLoCo",
    "NuqSgd",
    "OkTopK",
    "OneBit",
    "OnebitAdam",
    "Packed",
    "ParameterServer",
    "PeerLost",
    "PerLayer",
    "Plan",
    "PowerGossip",
    "PowerSgd",
    "Priority",
    "PrometheusSink",
    "PushSum",
    "Qsgd",
    "RandomK",
    "Scaffold",
    "ScaleCom",
    "Schedule",
    "Sequential",
    "Session",
    "Sharded",
    "Sidco",
    "SignSgd",
    "Sketch",
    "SlowMo",
    "Ssp",
    "StepValues",
    "Strategy",
    "StrategyError",
    "StreamingDiLoCo",
    "Synchronization",
    "SyntaxProblem",
    "TensorBoardSink",
    "TensorSpec",
    "TernGrad",
    "Thc",
    "Threshold",
    "TopK",
    "TrackerSink",
    "Traits",
    "Transport",
    "TwoBit",
    "UnknownName",
    "UnsupportedGradient",
    "UsageError",
    "ViewChange",
    "WandbSink",
    "Warmup",
    "Wfbp",
    "Wrapper",
    "ZeroOneAdam",
    "__version__",
    "attach",
    "redistribute",
]
