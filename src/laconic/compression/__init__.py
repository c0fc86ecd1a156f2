"""WHAT goes on the wire. One file per method; the list below registers it."""

from laconic.compression.acpsgd import AcpSgd
from laconic.compression.adacomp import AdaComp
from laconic.compression.adaptive import Adaptive
from laconic.compression.atomo import Atomo
from laconic.compression.cast import Bf16, Fp16
from laconic.compression.chain import Chain
from laconic.compression.cocktail import Cocktail
from laconic.compression.contract import Compressor, Wrapper
from laconic.compression.dct_cyclic import DctCyclic
from laconic.compression.dct_topk import DctTopK
from laconic.compression.dgc import Dgc
from laconic.compression.diana import Diana
from laconic.compression.ef21 import Ef21
from laconic.compression.ef_signsgd import EfSignSgd
from laconic.compression.elias import Elias
from laconic.compression.error_feedback import ErrorFeedback
from laconic.compression.families.by_step import ByStep
from laconic.compression.families.packed import Packed
from laconic.compression.families.two_levels import TwoLevels
from laconic.compression.fp8 import Fp8
from laconic.compression.gtopk import GTopK
from laconic.compression.integer import Int4, Int8
from laconic.compression.intsgd import IntSgd
from laconic.compression.momentum_correction import MomentumCorrection
from laconic.compression.natural import Natural
from laconic.compression.none import NoCompression
from laconic.compression.nuqsgd import NuqSgd
from laconic.compression.oktopk import OkTopK
from laconic.compression.onebit import OneBit
from laconic.compression.per_layer import PerLayer
from laconic.compression.powersgd import PowerSgd
from laconic.compression.qsgd import Qsgd
from laconic.compression.randomk import RandomK
from laconic.compression.scalecom import ScaleCom
from laconic.compression.sidco import Sidco
from laconic.compression.signsgd import SignSgd
from laconic.compression.sketch import Sketch
from laconic.compression.terngrad import TernGrad
from laconic.compression.thc import Thc
from laconic.compression.threshold import Threshold
from laconic.compression.topk import TopK
from laconic.compression.twobit import TwoBit
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
        NuqSgd,
        TernGrad,
        Natural,
        SignSgd,
        EfSignSgd,
        OneBit,
        IntSgd,
        Thc,
        TwoBit,
        PowerSgd,
        AcpSgd,
        Atomo,
        TopK,
        RandomK,
        Cocktail,
        ScaleCom,
        Sketch,
        Threshold,
        AdaComp,
        Dgc,
        Sidco,
        GTopK,
        OkTopK,
        DctTopK,
        DctCyclic,
        ErrorFeedback,
        Ef21,
        Diana,
        MomentumCorrection,
        Warmup,
        Adaptive,
        PerLayer,
        Chain,
        Elias,
    ],
)

__all__ = [
    "COMPRESSORS",
    "AcpSgd",
    "AdaComp",
    "Adaptive",
    "Atomo",
    "Bf16",
    "ByStep",
    "Chain",
    "Cocktail",
    "Compressor",
    "DctCyclic",
    "DctTopK",
    "Dgc",
    "Diana",
    "Ef21",
    "EfSignSgd",
    "Elias",
    "ErrorFeedback",
    "Fp8",
    "Fp16",
    "GTopK",
    "Int4",
    "Int8",
    "IntSgd",
    "MomentumCorrection",
    "Natural",
    "NoCompression",
    "NuqSgd",
    "OkTopK",
    "OneBit",
    "Packed",
    "PerLayer",
    "PowerSgd",
    "Qsgd",
    "RandomK",
    "ScaleCom",
    "Sidco",
    "SignSgd",
    "Sketch",
    "TernGrad",
    "Thc",
    "Threshold",
    "TopK",
    "TwoBit",
    "TwoLevels",
    "Warmup",
    "Wrapper",
]
