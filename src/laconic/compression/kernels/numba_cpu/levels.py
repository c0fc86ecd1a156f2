"""Levels between -largest and largest on a CPU: integers, qsgd, terngrad. Imported only where numba is installed."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from laconic.compression.kernels.numba_cpu.blocks import Block, blocks_of, codes_of, scratch_for, values_of, write
from laconic.compression.kernels.numba_cpu.chunk import INFINITY, fill, largest_bits, mix, sum_of_squares, uniform
from laconic.compression.kernels.numba_cpu.packing import pack, unpack
from laconic.compression.kernels.reference.quantizers import SMALLEST_SCALE
from laconic.compression.wire.chunks import Chunks

_ABSMAX, _L2, _CLIPPED = 0, 1, 2
"""How the unit of a chunk's levels is computed."""

# Whole numbers are cast after every operation: numba would widen them to 64 bits, and vectors would be half as long.
_u8, _u32, _i32, _f32 = np.uint8, np.uint32, np.int32, np.float32

_SMALLEST = _f32(SMALLEST_SCALE)
_ROUNDER = _f32(1.5 * 2**23)
"""Adding it to a number rounds that to the nearest whole number, ties to even, in the lowest bits of the sum."""


@njit(cache=True, nogil=True)
def _round_to_levels(x, inverse, largest, out):
    for i in range(len(x)):
        shifted = _f32(_f32(x[i] * inverse) + _ROUNDER)
        out[i] = _u8(_u32(shifted.view(_u32) + largest) & _u32(0xFF))


@njit(cache=True, nogil=True)
def _draw_levels(x, bound, inverse, largest, seed, out):
    for i in range(len(x)):
        scaled = _f32(min(abs(x[i]), bound) * inverse)
        level = _i32(scaled)
        up = uniform(mix(_u32(_u32(i) + seed))) < _f32(scaled - _f32(level))
        level = min(_i32(level + _i32(up)), largest)
        out[i] = _u8(largest - level) if x[i] < _f32(0) else _u8(largest + level)


@njit(cache=True, nogil=True)
def _encode_levels(
    values, starts, code_starts, seeds, seed, scales, codes, scratch, bits, largest, measure, clip, stochastic
):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[code_starts[chunk] : code_starts[chunk + 1]]
        levels = out if bits == 8 else scratch[: len(x)]
        bits_of_largest = largest_bits(x)
        scale = _u32(bits_of_largest).view(_f32)
        if measure == _L2:
            scale = _f32(np.sqrt(sum_of_squares(x)))
        elif measure == _CLIPPED:
            scale = min(scale, _f32(clip * np.sqrt(sum_of_squares(x) / len(x))))
        if bits_of_largest >= INFINITY or scale == _f32(np.inf):
            scales[chunk] = np.nan
            fill(levels, _u8(largest))
        elif scale < _SMALLEST:
            scales[chunk] = 0
            fill(levels, _u8(largest))
        else:
            scales[chunk] = _f32(scale / _f32(largest))
            inverse = _f32(_f32(largest) / scale)
            if stochastic:
                _draw_levels(x, scale, inverse, _i32(largest), mix(_u32(seeds[chunk] ^ seed)), levels)
            else:
                _round_to_levels(x, inverse, _u32(largest), levels)
        if bits != 8:
            fill(scratch[len(x) : (len(x) + 7) // 8 * 8], _u8(0))
            pack(scratch, len(x), bits, out)


@njit(cache=True, nogil=True)
def _decode_levels(scales, codes, starts, code_starts, scratch, bits, largest, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        data = codes[code_starts[chunk] : code_starts[chunk + 1]]
        if bits == 8:
            _scale_levels(data, _i32(largest), scales[chunk], y)
        else:
            unpack(data, len(y), bits, scratch)
            _scale_levels(scratch, _i32(largest), scales[chunk], y)


@njit(cache=True, nogil=True)
def _scale_levels(levels, largest, scale, out):
    for i in range(len(out)):
        out[i] = _f32(_f32(_i32(_i32(levels[i]) - largest)) * scale)


def _levels_encoder(
    flat: torch.Tensor,
    chunks: Chunks,
    packed: torch.Tensor,
    moment_seed: int,
    largest: int,
    measure: int,
    clip: float,
    stochastic: bool,
) -> None:
    codes, scratch = codes_of(packed, chunks), scratch_for(chunks)
    for block in blocks_of(chunks, packed, flat.dtype, random=stochastic):
        places = block.starts, block.code_starts, block.seeds, moment_seed, block.scales, codes, scratch
        _encode_levels(values_of(flat, block), *places, chunks.bits, largest, measure, clip, stochastic)


def encode_integer(
    flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, largest: int, stochastic: bool
) -> None:
    _levels_encoder(flat, chunks, packed, moment_seed, largest, _ABSMAX, 0.0, stochastic)


def encode_qsgd(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, levels: int) -> None:
    _levels_encoder(flat, chunks, packed, moment_seed, levels, _L2, 0.0, True)


def encode_terngrad(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, clip: float) -> None:
    _levels_encoder(flat, chunks, packed, moment_seed, 1, _CLIPPED, float(clip), True)


def decode_levels(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, add: bool, *, largest: int) -> None:
    codes, scratch = codes_of(packed, chunks), scratch_for(chunks)

    def decode(block: Block, y: NDArray[np.float32]) -> None:
        _decode_levels(block.scales, codes, block.starts, block.code_starts, scratch, chunks.bits, largest, y)

    write(packed, chunks, out, add, decode)
