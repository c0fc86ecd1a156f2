"""Rotated blocks on a shared grid on a GPU: values are read once. Imported only where Triton is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.triton_gpu.codes import mix, uniform
from laconic.compression.kernels.triton_gpu.rotation import LONGEST, hadamard, launches, places, signs
from laconic.compression.wire.rotation import Rotation

if TYPE_CHECKING:
    from laconic.compression.kernels.shared_grid import Grid


@triton.jit
def _encode(
    flat,
    blocks,
    starts,
    seeds,
    seed,
    drawn_with,
    units,
    shifts,
    lowest,
    highest,
    codes,
    factor,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block = tl.load(blocks + tl.program_id(0))
    at = places(starts, block, LENGTH, ALIGNED)
    x = tl.load(flat + at).to(tl.float32)
    x = hadamard(x * signs(seeds, block, seed, LENGTH), factor, LENGTH, STAGES)
    numbers = mix(tl.arange(0, LENGTH).to(tl.uint32) + mix((tl.load(seeds + block) ^ drawn_with).to(tl.uint32)))
    inverse = tl.math.div_rn(1.0, tl.load(units + block))
    scaled = (x + tl.load(shifts + block)) * inverse + uniform(numbers)
    number = tl.where(scaled == scaled, tl.floor(scaled), 0.0)
    code = tl.minimum(tl.maximum(number, lowest), highest) - lowest
    tl.store(codes + at, code.to(tl.int32).to(codes.dtype.element_ty))


@triton.jit
def _decode(
    sums,
    blocks,
    starts,
    seeds,
    seed,
    units,
    shifts,
    offset,
    count,
    out,
    factor,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block = tl.load(blocks + tl.program_id(0))
    at = places(starts, block, LENGTH, ALIGNED)
    number = tl.load(sums + at).to(tl.int32) + offset
    x = number.to(tl.float32) * tl.load(units + block) - tl.load(shifts + block) * count
    x = hadamard(x, factor, LENGTH, STAGES) * signs(seeds, block, seed, LENGTH)
    tl.store(out + at, x.to(out.dtype.element_ty))


def takes(rotation: Rotation) -> bool:
    """Whether one program can hold the longest block."""
    return rotation.longest <= LONGEST


def encode(
    flat: torch.Tensor, rotation: Rotation, seed: int, grid: Grid, moment_seed: int, *, codes: torch.Tensor
) -> None:
    """Fill `codes` from values that are not rotated yet."""
    tables = (rotation.starts_tensor, rotation.seeds_tensor)
    ends = (float(grid.low), float(grid.low + grid.levels))
    for blocks, factor, shape in launches(rotation):
        _encode[(len(blocks),)](
            flat, blocks, *tables, seed, moment_seed, grid.units, grid.shifts, *ends, codes, factor, **shape
        )


def decode(sums: torch.Tensor, count: int, rotation: Rotation, seed: int, grid: Grid, *, out: torch.Tensor) -> None:
    """Fill `out` with values that are rotated back."""
    tables = (rotation.starts_tensor, rotation.seeds_tensor)
    for blocks, factor, shape in launches(rotation):
        _decode[(len(blocks),)](
            sums,
            blocks,
            *tables,
            seed,
            grid.units,
            grid.shifts,
            count * grid.low,
            float(count),
            out,
            factor,
            **shape,
        )
