"""Randomized Hadamard transforms on a GPU: a program reads a block once. Imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore - absent where there is no GPU
import triton.language as tl  # pyrefly: ignore

from laconic.compression.kernels.reference import rotation as reference
from laconic.compression.kernels.triton_gpu.codes import mix
from laconic.compression.wire.rotation import Rotation

_LONGEST = 4096
"""Elements of one program at most."""
_PER_WARP = 512


@triton.jit
def _rotate(
    values,
    blocks,
    starts,
    seeds,
    seed,
    out,
    squares,
    factor,
    FORWARD: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block = tl.load(blocks + tl.program_id(0))
    start = tl.load(starts + block)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    at = start + tl.arange(0, LENGTH)
    numbers = mix(tl.arange(0, LENGTH).to(tl.uint32) + mix((tl.load(seeds + block) ^ seed).to(tl.uint32)))
    signs = 1.0 - 2.0 * (numbers & 1).to(tl.int32).to(tl.float32)
    x = tl.load(values + at).to(tl.float32)
    if FORWARD:
        x = x * signs
    # Each stage makes sums and differences of neighbours and moves the lowest bit of a position to the top; after all
    # stages every value is in its place again.
    for _ in tl.static_range(STAGES):
        first, second = tl.split(tl.reshape(x, (LENGTH // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (1, 0)), (LENGTH,))
    x = x * factor
    if FORWARD:
        wide = x.to(tl.float64)
        tl.store(squares + block, tl.sum(wide * wide, axis=0))
    else:
        x = x * signs
    tl.store(out + at, x.to(out.dtype.element_ty))


def forward(flat: torch.Tensor, rotation: Rotation, seed: int, rotated: torch.Tensor, squares: torch.Tensor) -> None:
    """Fill `rotated`, and `squares` with the sum of squares of each block, which may differ in its last bits."""
    if rotation.longest > _LONGEST:
        reference.forward(flat, rotation, seed, rotated, squares)
    else:
        _launch(flat, rotation, seed, rotated, squares, forward=True)


def backward(values: torch.Tensor, rotation: Rotation, seed: int, out: torch.Tensor) -> None:
    """Fill `out` with every block rotated back."""
    if rotation.longest > _LONGEST:
        reference.backward(values, rotation, seed, out)
    else:
        _launch(values, rotation, seed, out, out, forward=False)


def _launch(
    values: torch.Tensor, rotation: Rotation, seed: int, out: torch.Tensor, squares: torch.Tensor, *, forward: bool
) -> None:
    for length, blocks, aligned in rotation.by_length:
        _rotate[(len(blocks),)](
            values,
            blocks,
            rotation.starts_tensor,
            rotation.seeds_tensor,
            seed,
            out,
            squares,
            length**-0.5,
            FORWARD=forward,
            LENGTH=length,
            STAGES=length.bit_length() - 1,
            ALIGNED=aligned,
            num_warps=max(1, length // _PER_WARP),
            enable_fp_fusion=False,
        )
