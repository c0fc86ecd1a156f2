"""WHAT goes on the wire. One file per method; its registration is its entry in the list below."""

from laconic.compression.cast import Bf16, Fp16
from laconic.compression.chain import Chain
from laconic.compression.contract import Compressor, Packed, Wrapper
from laconic.compression.dct_topk import DctTopK
from laconic.compression.dgc import Dgc
from laconic.compression.ef21 import Ef21
from laconic.compression.ef_signsgd import EfSignSgd
from laconic.compression.error_feedback import ErrorFeedback
from laconic.compression.families.by_step import ByStep
from laconic.compression.fp8 import Fp8
from laconic.compression.gtopk import GTopK
from laconic.compression.integer import Int4, Int8
from laconic.compression.momentum_correction import MomentumCorrection
from laconic.compression.natural import Natural
from laconic.compression.none import NoCompression
from laconic.compression.onebit import OneBit
from laconic.compression.per_layer import PerLayer
from laconic.compression.powersgd import PowerSgd
from laconic.compression.qsgd import Qsgd
from laconic.compression.randomk import RandomK
from laconic.compression.sidco import Sidco
from laconic.compression.signsgd import SignSgd
from laconic.compression.terngrad import TernGrad
from laconic.compression.threshold import Threshold
from laconic.compression.topk import TopK
from laconic.compression.warmup import Warmup
from laconic.registry import Registry

COMPRESSORS: Registry[Compressor] = Registry(
    "compression",
    Compressor,
    [
        NoCompression,
        Fp16,
        Bf16,
        Fp8,
        Int8,
        Int4,
        Qsgd,
        TernGrad,
        Natural,
        SignSgd,
        EfSignSgd,
        OneBit,
        PowerSgd,
        TopK,
        RandomK,
        Threshold,
        Dgc,
        Sidco,
        GTopK,
        DctTopK,
        ErrorFeedback,
        Ef21,
        MomentumCorrection,
        Warmup,
        PerLayer,
        Chain,
    ],
)

__all__ = [
    "COMPRESSORS",
    "Bf16",
    "ByStep",
    "Chain",
    "Compressor",
    "DctTopK",
    "Dgc",
    "Ef21",
    "EfSignSgd",
    "ErrorFeedback",
    "Fp8",
    "Fp16",
    "GTopK",
    "Int4",
    "Int8",
    "MomentumCorrection",
    "Natural",
    "NoCompression",
    "OneBit",
    "Packed",
    "PerLayer",
    "PowerSgd",
    "Qsgd",
    "RandomK",
    "Sidco",
    "SignSgd",
    "TernGrad",
    "Threshold",
    "TopK",
    "Warmup",
    "Wrapper",
]
