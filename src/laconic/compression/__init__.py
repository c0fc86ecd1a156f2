"""WHAT goes on the wire. One file per method; its registration is its entry in the list below."""

from laconic.compression.cast import Bf16, Fp16
from laconic.compression.contract import Compressor, Packed, Wrapper
from laconic.compression.error_feedback import ErrorFeedback
from laconic.compression.none import NoCompression
from laconic.registry import Registry

COMPRESSORS: Registry[Compressor] = Registry("compression", Compressor, [NoCompression, Fp16, Bf16, ErrorFeedback])

__all__ = ["COMPRESSORS", "Bf16", "Compressor", "ErrorFeedback", "Fp16", "NoCompression", "Packed", "Wrapper"]
