"""Quantizers on a CPU: one pass over a chunk for its scale, one for its codes, while it is in the cache.

Bit for bit what `reference` gives; only a scale that is a sum (L1, L2, means) may differ in its last bit, because the
sum is made in another order. Each function has one signature, compiled when it is first called and kept on disk.
Imported only where numba is installed.
"""

from __future__ import annotations

from collections.abc import Callable

from laconic.compression.kernels.numba_cpu.casts import encode_bf16, encode_fp16
from laconic.compression.kernels.numba_cpu.floats import decode_fp8, decode_natural, encode_fp8, encode_natural
from laconic.compression.kernels.numba_cpu.levels import decode_levels, encode_integer, encode_qsgd, encode_terngrad
from laconic.compression.kernels.numba_cpu.logarithmic import decode_nuqsgd, encode_nuqsgd
from laconic.compression.kernels.numba_cpu.signs import L1, MEANS, ONE, signs_decoder, signs_encoder

ENCODERS: dict[str, Callable[..., None]] = {
    "integer": encode_integer,
    "qsgd": encode_qsgd,
    "nuqsgd": encode_nuqsgd,
    "terngrad": encode_terngrad,
    "fp8": encode_fp8,
    "natural": encode_natural,
    "sign": signs_encoder(ONE),
    "scaled_sign": signs_encoder(L1),
    "onebit": signs_encoder(MEANS),
    "bf16": encode_bf16,
    "fp16": encode_fp16,
}
"""As `reference.ENCODERS`."""

DECODERS: dict[str, Callable[..., None]] = {
    "levels": decode_levels,
    "nuqsgd": decode_nuqsgd,
    "fp8": decode_fp8,
    "natural": decode_natural,
    "sign": signs_decoder(ONE),
    "onebit": signs_decoder(MEANS),
}
"""As `reference.DECODERS`."""
