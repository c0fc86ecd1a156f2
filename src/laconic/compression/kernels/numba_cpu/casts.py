"""Stochastic rounding to 16 bits on a CPU. Imported only where numba is installed."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from laconic.compression.kernels.numba_cpu.blocks import blocks_of, codes_of, values_of
from laconic.compression.kernels.numba_cpu.chunk import INFINITY, mix, uniform
from laconic.compression.wire.chunks import Chunks

# Whole numbers are cast after every operation: numba would widen them to 64 bits, and vectors would be half as long.
_u32, _i32, _f32 = np.uint32, np.int32, np.float32

_FP16_LOWEST = _u32(113 << 23)
"""2^-14: fp16 has no smaller exponent, only fewer digits."""


@njit(cache=True, nogil=True)
def _draw_bf16(values, starts, seeds, seed, codes):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] : starts[chunk + 1]]
        chunk_seed = mix(_u32(seeds[chunk] ^ seed))
        for i in range(len(x)):
            bits = _f32(x[i]).view(_u32)
            magnitude = _u32(bits & _u32(0x7FFFFFFF))
            number = _u32(mix(_u32(_u32(i) + chunk_seed)) >> _u32(16))
            code = _u32(_u32(bits + (number if magnitude < INFINITY else _u32(0))) >> _u32(16))
            out[i] = np.uint16(_u32(0x7FC0) if magnitude > INFINITY else code)


@njit(cache=True, nogil=True)
def _draw_fp16(values, starts, seeds, seed, codes):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] : starts[chunk + 1]]
        chunk_seed = mix(_u32(seeds[chunk] ^ seed))
        for i in range(len(x)):
            bits = _f32(x[i]).view(_u32)
            magnitude = _u32(bits & _u32(0x7FFFFFFF))
            number = mix(_u32(_u32(i) + chunk_seed))
            magnitude_or_infinity = min(abs(x[i]), _f32(2.0**17))
            exponent = max(_u32(_f32(magnitude_or_infinity).view(_u32) & INFINITY), _FP16_LOWEST)
            steps = _f32(magnitude_or_infinity * _u32(_u32(264 << 23) - exponent).view(_f32))
            level = _i32(steps)
            up = uniform(number) < _f32(steps - _f32(level))
            code = _u32(_u32(_u32(exponent - _FP16_LOWEST) >> _u32(13)) + _u32(level + _i32(up)))
            code = min(code, _u32(0x7C00))
            code = _u32(code | _u32((bits >> _u32(16)) & _u32(0x8000)))
            out[i] = np.uint16(_u32(0x7E00) if magnitude > INFINITY else code)


def encode_bf16(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int) -> None:
    codes = codes_of(packed, chunks).view(np.uint16)
    for block in blocks_of(chunks, packed, flat.dtype, random=True):
        _draw_bf16(values_of(flat, block), block.starts, block.seeds, moment_seed, codes)


def encode_fp16(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int) -> None:
    codes = codes_of(packed, chunks).view(np.uint16)
    for block in blocks_of(chunks, packed, flat.dtype, random=True):
        _draw_fp16(values_of(flat, block), block.starts, block.seeds, moment_seed, codes)
