"""Randomized Hadamard transforms on a GPU: a program reads a block once. Imported only where Triton is installed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import rotation as reference
from laconic.compression.kernels.triton_gpu.codes import mix
from laconic.compression.wire.rotation import Rotation

LONGEST = 4096
"""Elements of one program at most."""
_PER_WARP = 1024


@triton.jit
def signs(seeds, block, seed, LENGTH: tl.constexpr):
    """The random signs of one block, 32 from each random number."""
    WORDS: tl.constexpr = max(LENGTH // 32, 1)
    BITS: tl.constexpr = LENGTH // WORDS
    numbers = mix(tl.arange(0, WORDS).to(tl.uint32) + mix((tl.load(seeds + block) ^ seed).to(tl.uint32)))
    bits = (numbers[:, None] >> tl.arange(0, BITS).to(tl.uint32)[None, :]) & 1
    return tl.reshape(1.0 - 2.0 * bits.to(tl.int32).to(tl.float32), (LENGTH,))


@triton.jit
def hadamard(x, factor, LENGTH: tl.constexpr, STAGES: tl.constexpr):
    """The Hadamard transform of one block, times `factor`."""
    # Each stage makes sums and differences of neighbours and moves the lowest bit of a position to the top; after all
    # stages every value is in its place again.
    for _ in tl.static_range(STAGES):
        first, second = tl.split(tl.reshape(x, (LENGTH // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (1, 0)), (LENGTH,))
    return x * factor


@triton.jit
def places(starts, block, LENGTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the values of one block are."""
    start = tl.load(starts + block)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start + tl.arange(0, LENGTH)


@triton.jit
def _square(values, blocks, starts, squares, LENGTH: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr):
    block = tl.load(blocks + tl.program_id(0))
    wide = tl.load(values + places(starts, block, LENGTH, ALIGNED)).to(tl.float32).to(tl.float64)
    tl.store(squares + block, tl.sum(wide * wide, axis=0))


@triton.jit
def _rotate(
    values,
    blocks,
    starts,
    seeds,
    seed,
    out,
    factor,
    FORWARD: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block = tl.load(blocks + tl.program_id(0))
    at, sign = places(starts, block, LENGTH, ALIGNED), signs(seeds, block, seed, LENGTH)
    x = tl.load(values + at).to(tl.float32)
    if FORWARD:
        x = hadamard(x * sign, factor, LENGTH, STAGES)
    else:
        x = hadamard(x, factor, LENGTH, STAGES) * sign
    tl.store(out + at, x.to(out.dtype.element_ty))


def sums_of_squares(flat: torch.Tensor, rotation: Rotation, squares: torch.Tensor) -> None:
    """Fill `squares` with the sum of each block, which may differ in its last bits."""
    if rotation.longest > LONGEST:
        reference.sums_of_squares(flat, rotation, squares)
        return
    for blocks, _, shape in launches(rotation):
        _square[(len(blocks),)](flat, blocks, rotation.starts_tensor, squares, **shape)


def forward(flat: torch.Tensor, rotation: Rotation, seed: int, rotated: torch.Tensor) -> None:
    """Fill `rotated`."""
    if rotation.longest > LONGEST:
        reference.forward(flat, rotation, seed, rotated)
    else:
        _launch(flat, rotation, seed, rotated, forward=True)


def backward(values: torch.Tensor, rotation: Rotation, seed: int, out: torch.Tensor) -> None:
    """Fill `out` with every block rotated back."""
    if rotation.longest > LONGEST:
        reference.backward(values, rotation, seed, out)
    else:
        _launch(values, rotation, seed, out, forward=False)


def _launch(values: torch.Tensor, rotation: Rotation, seed: int, out: torch.Tensor, *, forward: bool) -> None:
    tables = (rotation.starts_tensor, rotation.seeds_tensor)
    for blocks, factor, shape in launches(rotation):
        _rotate[(len(blocks),)](values, blocks, *tables, seed, out, factor, FORWARD=forward, **shape)


def launches(rotation: Rotation) -> Iterator[tuple[torch.Tensor, float, dict[str, int | bool]]]:
    """For the blocks of each length: their numbers, the factor of the transform, and what kernels are compiled for."""
    for length, blocks, aligned in rotation.by_length:
        yield (
            blocks,
            length**-0.5,
            {
                "LENGTH": length,
                "STAGES": length.bit_length() - 1,
                "ALIGNED": aligned,
                "num_warps": max(1, length // _PER_WARP),
                # A product that is added must be rounded first, as everywhere else.
                "enable_fp_fusion": False,
            },
        )
