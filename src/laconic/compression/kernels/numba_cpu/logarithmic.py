"""Powers of two below a norm on a CPU: nuqsgd. Imported only where numba is installed."""

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

# Whole numbers are cast after every operation: numba would widen them to 64 bits, and vectors would be half as long.
_u8, _u32, _i32, _f32 = np.uint8, np.uint32, np.int32, np.float32

_SMALLEST = _f32(SMALLEST_SCALE)


@njit(cache=True, nogil=True)
def _draw_powers(x, inverse, levels, seed, out):
    up_from_lowest = _u32(_u32(126 + levels) << _u32(23)).view(_f32)
    for i in range(len(x)):
        magnitude = min(abs(_f32(x[i] * inverse)), _f32(1))
        bits = _f32(magnitude).view(_u32)
        number = mix(_u32(_u32(i) + seed))
        below = max(_i32(_i32(bits >> _u32(23)) - _i32(127) + levels), _i32(0))
        rises = _u32(number >> _u32(8)) < _u32(_u32(bits & _u32(0x7FFFFF)) * _u32(2))
        starts = uniform(number) < _f32(magnitude * up_from_lowest)
        level = min(_i32(below + _i32(rises if below > _i32(0) else starts)), levels)
        out[i] = _u8(levels - level) if x[i] < _f32(0) else _u8(levels + level)


@njit(cache=True, nogil=True)
def _encode(values, starts, code_starts, seeds, seed, scales, codes, scratch, bits, levels):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[code_starts[chunk] : code_starts[chunk + 1]]
        found = out if bits == 8 else scratch[: len(x)]
        norm = _f32(np.sqrt(sum_of_squares(x)))
        if largest_bits(x) >= INFINITY or norm == _f32(np.inf):
            scales[chunk] = np.nan
            fill(found, _u8(levels))
        elif norm < _SMALLEST:
            scales[chunk] = 0
            fill(found, _u8(levels))
        else:
            scales[chunk] = norm
            _draw_powers(x, _f32(_f32(1) / norm), _i32(levels), mix(_u32(seeds[chunk] ^ seed)), found)
        if bits != 8:
            fill(scratch[len(x) : (len(x) + 7) // 8 * 8], _u8(0))
            pack(scratch, len(x), bits, out)


@njit(cache=True, nogil=True)
def _decode(scales, codes, starts, code_starts, scratch, bits, table, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        data = codes[code_starts[chunk] : code_starts[chunk + 1]]
        levels = data
        if bits != 8:
            unpack(data, len(y), bits, scratch)
            levels = scratch
        for i in range(len(y)):
            y[i] = _f32(table[levels[i]] * scales[chunk])


def encode_nuqsgd(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int, *, levels: int) -> None:
    codes, scratch = codes_of(packed, chunks), scratch_for(chunks)
    for block in blocks_of(chunks, packed, flat.dtype, random=True):
        places = block.starts, block.code_starts, block.seeds, moment_seed, block.scales, codes, scratch
        _encode(values_of(flat, block), *places, chunks.bits, levels)


def decode_nuqsgd(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, add: bool, *, largest: int) -> None:
    codes, scratch, table = codes_of(packed, chunks), scratch_for(chunks), _powers(largest)

    def decode(block: Block, y: NDArray[np.float32]) -> None:
        _decode(block.scales, codes, block.starts, block.code_starts, scratch, chunks.bits, table, y)

    write(packed, chunks, out, add, decode)


def _powers(levels: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The value of each code, as a multiple of the norm."""
    number = np.arange(-levels, levels + 1)
    return np.where(number == 0, 0.0, np.sign(number) * 2.0 ** (np.abs(number) - levels)).astype(np.float32)
