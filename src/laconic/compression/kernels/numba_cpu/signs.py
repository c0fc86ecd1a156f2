"""Signs and their scales on a CPU. Imported only where numba is installed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from laconic.compression.kernels.numba_cpu.blocks import Block, blocks_of, codes_of, scratch_for, values_of, write
from laconic.compression.kernels.numba_cpu.chunk import (
    INFINITY,
    fill,
    largest_bits,
    sum_of_magnitudes,
    sum_of_negatives,
    sum_of_positives,
)
from laconic.compression.kernels.numba_cpu.packing import pack, unpack
from laconic.compression.wire.chunks import Chunks

ONE, L1, MEANS = 0, 1, 2
"""The scale of a chunk's signs: 1, the mean magnitude, or the mean of each sign."""

_u8, _f32 = np.uint8, np.float32


@njit(cache=True, nogil=True)
def _encode_signs(values, starts, code_starts, scales, codes, scratch, worth):
    for chunk in range(len(starts) - 1):
        x = values[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        out = codes[code_starts[chunk] : code_starts[chunk + 1]]
        finite = largest_bits(x) < INFINITY
        if worth == ONE:
            scales[chunk] = _f32(1) if finite else _f32(np.nan)
        elif worth == L1:
            scales[chunk] = _f32(sum_of_magnitudes(x) / len(x)) if finite else _f32(np.nan)
        else:
            high, count = sum_of_positives(x)
            low = sum_of_negatives(x)
            scales[2 * chunk] = _f32(high / max(count, 1)) if finite else _f32(np.nan)
            scales[2 * chunk + 1] = _f32(low / max(len(x) - count, 1)) if finite else _f32(np.nan)
        for i in range(len(x)):
            scratch[i] = _u8(x[i] >= _f32(0))
        fill(scratch[len(x) : (len(x) + 7) // 8 * 8], _u8(0))
        pack(scratch, len(x), 1, out)


@njit(cache=True, nogil=True)
def _decode_signs(scales, codes, starts, code_starts, scratch, worth, out):
    for chunk in range(len(starts) - 1):
        y = out[starts[chunk] - starts[0] : starts[chunk + 1] - starts[0]]
        unpack(codes[code_starts[chunk] : code_starts[chunk + 1]], len(y), 1, scratch)
        high = scales[2 * chunk] if worth == MEANS else scales[chunk]
        low = scales[2 * chunk + 1] if worth == MEANS else _f32(-high)
        for i in range(len(y)):
            y[i] = high if scratch[i] else low


def signs_encoder(worth: int) -> Callable[..., None]:

    def encode(flat: torch.Tensor, chunks: Chunks, packed: torch.Tensor, moment_seed: int) -> None:
        codes, scratch = codes_of(packed, chunks), scratch_for(chunks)
        for block in blocks_of(chunks, packed, flat.dtype):
            _encode_signs(values_of(flat, block), block.starts, block.code_starts, block.scales, codes, scratch, worth)

    return encode


def signs_decoder(worth: int) -> Callable[..., None]:

    def decode(packed: torch.Tensor, chunks: Chunks, out: torch.Tensor, add: bool) -> None:
        codes, scratch = codes_of(packed, chunks), scratch_for(chunks)

        def decode_block(block: Block, y: NDArray[np.float32]) -> None:
            _decode_signs(block.scales, codes, block.starts, block.code_starts, scratch, worth, y)

        write(packed, chunks, out, add, decode_block)

    return decode
