"""Values as short floating-point numbers on a CPU: fp8 and powers of two. Imported only where numba is installed."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from laconic.compression.kernels.numba_cpu.blocks import Block, blocks_of, codes_of, values_of, write
from laconic.compression.kernels.numba_cpu.chunk import INFINITY, fill, largest_bits, mix, uniform
from laconic.compression.kernels.reference.quantizers import LARGEST_FP8, SMALLEST_SCALE
from laconic.compression.wire.chunks import Chunks

# Whole numbers are cast after every operation: numba would widen them to 64 bits, and vectors would be half as long.
_u8, _u32, _i32, _f32 = np.uint8, np.uint32, np.int32, np.float32

_SMALLEST = _f32(SMALLEST_SCALE)
_FP8_LOWEST = _u32(121 << 23)
"""2^-6: e4m3 has no smaller exponent, only fewer digits."""
_TWENTY = _u32(20 << 23)
"""Twenty in the exponent of a float32."""
_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@njit(cache=True, nogil=True)
def _round_to_fp8(x, inverse, out):
    for i in range(len(x)):
        scaled = _f32(x[i] * inverse)
        bits = scaled.view(_u32)
        exponent = max(_u32(bits & INFINITY), _FP8_LOWEST)
        # Added to 2^20 times the power of two below it, a number is rounded to steps of an eighth of that power.
        shifted = _f32(abs(scaled) + _u32(exponent + _TWENTY).view(_f32))
        steps = _u32(_u32(shifted.view(_u32) - exponent) - _TWENTY)
        code = _u32(_u32(_u32(exponent - _FP8_LOWEST) >> _u32(20)) + steps)
        out[i] = _u8(code | _u32((bits >> _u32(24)) & _u32(128)))


@njit(cache=True, nogil=True)
def _draw_fp8(x, inverse, seed, out):
    for i in range(len(x)):
        scaled = _f32(x[i] * inverse)
        bits = scaled.view(_u32)
        exponent = max(_u32(bits & INFINITY), _FP8_LOWEST)
        steps = _f32(abs(scaled) * _u32(_u32(257 << 23) - exponent).view(_f32))
        level = _i32(steps)
        up = uniform(mix(_u32(_u32(i) + seed))) < _f32(steps - _f32(level))
        code = _u32(_u32(_u32(exponent - _FP8_LOWEST) >> _u32(20)) + _u32(level + _i32(up)))
        out[i] = _u8(min(code, _u32(0x7E)) | _u32((bits >> _u32(24)) & _u32(128)))


@njit(cache=True, nogil=True)
def _encode_fp8(values, starts, seeds, seed, scales, codes, stochastic):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] : starts[chunk + 1]]
        largest = largest_bits(x)
        scale = _u32(largest).view(_f32)
        if largest >= INFINITY or scale < _SMALLEST:
            scales[chunk] = np.nan if largest >= INFINITY else 0
            fill(out, _u8(0))
        else:
            scales[chunk] = _f32(scale / _f32(LARGEST_FP8))
            inverse = _f32(_f32(LARGEST_FP8) / scale)
            if stochastic:
                _draw_fp8(x, inverse, mix(_u32(seeds[chunk] ^ seed)), out)
            else:
                _round_to_fp8(x, inverse, out)


@njit(cache=True, nogil=True)
def _decode_fp8(scales, codes, starts, table, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        levels = codes[starts[chunk] : starts[chunk + 1]]
        scale = scales[chunk]
        for i in range(len(y)):
            y[i] = _f32(table[levels[i]] * scale)


@njit(cache=True, nogil=True)
def _draw_powers(x, top, seed, out):
    lowest = _i32(max(top - 126, 1))
    up_from_lowest = _u32(_u32(254 - lowest) << _u32(23)).view(_f32)
    for i in range(len(x)):
        bits = _f32(x[i]).view(_u32)
        magnitude = _u32(bits & _u32(0x7FFFFFFF))
        number = mix(_u32(_u32(i) + seed))
        exponent = _i32(magnitude >> _u32(23))
        up = _u32(number >> _u32(8)) < _u32(_u32(magnitude & _u32(0x7FFFFF)) * _u32(2))
        code = _i32(1 + top - min(_i32(exponent + _i32(up)), top))
        kept = uniform(number) < _f32(abs(x[i]) * up_from_lowest)
        code = code if exponent >= lowest else _i32(_i32(1 + top - lowest) * _i32(kept))
        out[i] = _u8(_u32(code) | _u32((bits >> _u32(24)) & _u32(128))) if code > 0 else _u8(0)


@njit(cache=True, nogil=True)
def _encode_natural(values, starts, seeds, seed, scales, codes):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[starts[chunk] : starts[chunk + 1]]
        largest = largest_bits(x)
        if largest >= INFINITY or largest == _u32(0):
            scales[chunk] = np.nan if largest >= INFINITY else 0
            fill(out, _u8(0))
        else:
            top = min(_i32(_i32(largest >> _u32(23)) + 1), _i32(254))
            scales[chunk] = _u32(_u32(top) << _u32(23)).view(_f32)
            _draw_powers(x, top, mix(_u32(seeds[chunk] ^ seed)), out)


@njit(cache=True, nogil=True)
def _decode_natural(scales, codes, starts, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        levels = codes[starts[chunk] : starts[chunk + 1]]
        if np.isnan(scales[chunk]):
            fill(y, scales[chunk])
            continue
        top = _u32(_f32(scales[chunk]).view(_u32) >> _u32(23))
        for i in range(len(y)):
            code = _u32(levels[i])
            below = _u32(code & _u32(0x7F))
            power = _u32(_u32(top + _u32(1) - below) << _u32(23))
            sign = _u32(_u32(code & _u32(0x80)) << _u32(24))
            y[i] = _u32(_u32(power | sign) if below > _u32(0) else _u32(0)).view(_f32)


def encode_fp8(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, stochastic: bool) -> None:
    codes = codes_of(packed, chunks)
    for block in blocks_of(chunks, packed, flat.dtype, random=stochastic):
        _encode_fp8(values_of(flat, block), block.starts, block.seeds, moment_seed, block.scales, codes, stochastic)


def decode_fp8(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, add: bool) -> None:
    codes = codes_of(packed, chunks)

    def decode(block: Block, y: NDArray[np.float32]) -> None:
        _decode_fp8(block.scales, codes, block.starts, _FP8_VALUES, y)

    write(packed, chunks, out, add, decode)


def encode_natural(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int) -> None:
    codes = codes_of(packed, chunks)
    for block in blocks_of(chunks, packed, flat.dtype, random=True):
        _encode_natural(values_of(flat, block), block.starts, block.seeds, moment_seed, block.scales, codes)


def decode_natural(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, add: bool) -> None:
    codes = codes_of(packed, chunks)

    def decode(block: Block, y: NDArray[np.float32]) -> None:
        _decode_natural(block.scales, codes, block.starts, y)

    write(packed, chunks, out, add, decode)
