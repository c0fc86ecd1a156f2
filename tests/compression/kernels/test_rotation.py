"""Randomized Hadamard transforms, alone and on a shared grid: fused kernels give the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

from laconic.compression.kernels import rotated_grid, shared_grid
from laconic.compression.kernels.loader import has_faster, load_faster
from laconic.compression.kernels.rotation import backward, forward, sums_of_squares
from laconic.compression.kernels.shared_grid import Grid
from laconic.compression.wire.rotation import Rotation
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits

SIZES = [(0,), (1,), (37, 0, 5000, 64), (4096, 100_000)]
SEED = 12345


def assert_rotations_agree(sizes: tuple[int, ...], block: int, device: str) -> None:
    specs = (TensorSpec(f"p{i}", (size,), device=torch.device(device)) for i, size in enumerate(sizes))
    rotation = Rotation(Bucket(tuple(specs)), block)
    flat = torch.randn(rotation.bucket.numel, generator=torch.Generator().manual_seed(block)).to(device)
    rotated, plain = forward(flat, rotation, SEED), forward(flat, rotation, SEED, reference=True)
    assert bits(rotated.cpu()) == bits(plain.cpu())
    squares = sums_of_squares(flat, rotation)
    assert torch.allclose(squares, sums_of_squares(flat, rotation, reference=True), rtol=1e-12)
    assert float(squares.sum()) == pytest.approx(float(flat.double().square().sum()), rel=1e-12)
    assert torch.allclose(sums_of_squares(rotated, rotation), squares, rtol=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        again, plain = torch.full((2, flat.numel()), 7.0, dtype=dtype, device=device)
        backward(rotated, rotation, SEED, again)
        backward(rotated, rotation, SEED, plain, reference=True)
        assert bits(again.cpu()) == bits(plain.cpu())
        assert torch.allclose(again.float(), flat, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)


def assert_grids_agree(sizes: tuple[int, ...], block: int, device: str) -> None:
    specs = (TensorSpec(f"p{i}", (size,), device=torch.device(device)) for i, size in enumerate(sizes))
    rotation = Rotation(Bucket(tuple(specs)), block)
    flat = torch.randn(rotation.bucket.numel, generator=torch.Generator().manual_seed(block)).to(device)
    reach = torch.full((rotation.num_chunks,), 2.0, device=device)
    reach[1::7], reach[2::9] = 0.0, torch.nan
    grid = Grid(reach / 15, reach, 0, 30)
    rotated = forward(flat, rotation, SEED, reference=True)
    codes, plain = (torch.full((flat.numel(),), 7, dtype=torch.uint8, device=device) for _ in range(2))
    rotated_grid.encode(flat, rotation, SEED, grid, 11, codes=codes)
    shared_grid.encode(rotated, rotation, grid, 11, plain, reference=True)
    assert torch.equal(codes, plain)
    for dtype in (torch.float32, torch.bfloat16):
        out, plain = torch.full((2, flat.numel()), 7.0, dtype=dtype, device=device)
        rotated_grid.decode(codes, 3, rotation, SEED, grid, out=out)
        shared_grid.decode(codes, 3, rotation, grid, rotated, reference=True)
        backward(rotated, rotation, SEED, plain, reference=True)
        assert torch.equal(out.isnan(), plain.isnan())
        assert bits(out.nan_to_num(7.0).cpu()) == bits(plain.nan_to_num(7.0).cpu())


@pytest.mark.parametrize("block", [32, 1024, 1500, 65536])
def test_on_a_cpu(block: int) -> None:
    for sizes in SIZES:
        assert_rotations_agree(sizes, block, "cpu")
        assert_grids_agree(sizes, block, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("block", [32, 1024, 1500, 65536])
def test_on_a_gpu(block: int) -> None:
    assert has_faster("rotation", "cuda")
    assert load_faster("rotated_grid", "cuda") is not None
    for sizes in SIZES:
        assert_rotations_agree(sizes, block, "cuda")
        assert_grids_agree(sizes, block, "cuda")
