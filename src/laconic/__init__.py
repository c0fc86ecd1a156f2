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
        Choco,
        Gossip,
        ParameterServer,
        PushSum,
        Sharded,
    )
    from laconic.compression import (
        Bf16,
        Chain,
        Compressor,
        DctTopK,
        Dgc,
        Ef21,
        EfSignSgd,
        ErrorFeedback,
        Fp8,
        Fp16,
        GTopK,
        Int4,
        Int8,
        MomentumCorrection,
        Natural,
        NoCompression,
        OneBit,
        Packed,
        PerLayer,
        PowerSgd,
        Qsgd,
        RandomK,
        Sidco,
        SignSgd,
        TernGrad,
        Threshold,
        TopK,
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
    from laconic.runtime import Session, attach, redistribute
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
        Asp,
        Bsp,
        DecoupledMomentum,
        Demo,
        DiLoCo,
        LocalSgd,
        LocalUpdates,
        OnebitAdam,
        SlowMo,
        Ssp,
        StreamingDiLoCo,
        Synchronization,
    )
else:
    _NAMES = {
        "laconic.architecture": "AllReduce Architecture Choco Gossip ParameterServer PushSum Sharded",
        "laconic.compression": (
            "Bf16 Chain Compressor DctTopK Dgc Ef21 EfSignSgd ErrorFeedback Fp8 Fp16 GTopK Int4 Int8 "
            "MomentumCorrection Natural NoCompression OneBit Packed PerLayer PowerSgd Qsgd RandomK Sidco "
            "SignSgd TernGrad Threshold TopK Warmup Wrapper"
        ),
        "laconic.compression.traits": "Traits",
        "laconic.core.in_process": "InProcessCluster",
        "laconic.core.moment": "Moment",
        "laconic.core.plan": "Bucket Plan",
        "laconic.core.stateful": "BucketState",
        "laconic.core.tensor": "TensorSpec",
        "laconic.core.transport": "Transport",
        "laconic.runtime": "Session attach redistribute",
        "laconic.scheduling": "Dear Fusion MgWfbp Priority Schedule Sequential Wfbp",
        "laconic.sinks": "MlflowSink PrometheusSink StepValues TensorBoardSink TrackerSink WandbSink",
        "laconic.strategy": "Strategy",
        "laconic.synchronization": (
            "Asp Bsp DecoupledMomentum Demo DiLoCo LocalSgd LocalUpdates OnebitAdam SlowMo Ssp "
            "StreamingDiLoCo Synchronization"
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
    "AllReduce",
    "Architecture",
    "Asp",
    "AttachError",
    "Bf16",
    "Bsp",
    "Bucket",
    "BucketState",
    "Chain",
    "CheckpointError",
    "Choco",
    "CommunicationError",
    "Compressor",
    "DctTopK",
    "Dear",
    "DecoupledMomentum",
    "Demo",
    "Dgc",
    "DiLoCo",
    "Ef21",
    "EfSignSgd",
    "ErrorFeedback",
    "Event",
    "EventList",
    "EventLog",
    "EventSink",
    "EventTee",
    "Fp8",
    "Fp16",
    "FrameRefused",
    "Fusion",
    "GTopK",
    "Gossip",
    "IllegalCombination",
    "InProcessCluster",
    "Int4",
    "Int8",
    "InvalidSetting",
    "LaconicError",
    "LaconicWarning",
    "LocalSgd",
    "LocalUpdates",
    "MethodError",
    "MgWfbp",
    "MlflowSink",
    "Moment",
    "MomentumCorrection",
    "Natural",
    "NoCompression",
    "OneBit",
    "OnebitAdam",
    "Packed",
    "ParameterServer",
    "PeerLost",
    "PerLayer",
    "Plan",
    "PowerSgd",
    "Priority",
    "PrometheusSink",
    "PushSum",
    "Qsgd",
    "RandomK",
    "Schedule",
    "Sequential",
    "Session",
    "Sharded",
    "Sidco",
    "SignSgd",
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
    "Threshold",
    "TopK",
    "TrackerSink",
    "Traits",
    "Transport",
    "UnknownName",
    "UnsupportedGradient",
    "UsageError",
    "WandbSink",
    "Warmup",
    "Wfbp",
    "Wrapper",
    "__version__",
    "attach",
    "redistribute",
]
