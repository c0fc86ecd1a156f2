"""Whole numbers on a shared grid and their words: fused kernels give the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

from laconic.compression.kernels import shared_grid
from laconic.compression.kernels.lanes import new_numbers, pack, unpack
from laconic.compression.kernels.loader import has_faster
from laconic.compression.kernels.shared_grid import Grid
from laconic.compression.wire.chunks import Chunks
from laconic.compression.wire.lanes import Lanes
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits

SIZES = [(1,), (37, 0, 5000, 64), (4096, 300_000)]
COUNT = 3
GRIDS = [(-31, 62), (0, 30), (-1, 2), (-500, 1000)]
"""Lowest number and levels; with three ranks, sums of the first need 8 bits: the bytes of words are the numbers."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def assert_grids_agree(sizes: tuple[int, ...], low: int, levels: int, dtype: torch.dtype, device: str) -> None:
    specs = (TensorSpec(f"p{i}", (size,), dtype, torch.device(device)) for i, size in enumerate(sizes))
    chunks = Chunks(Bucket(tuple(specs)), 128, 8, 0)
    generator = torch.Generator().manual_seed(sum(sizes))
    flat = 3 * torch.randn(chunks.bucket.numel, generator=generator)
    flat[5::971], flat[6::1973], flat[7::2971], flat[8::997] = torch.nan, torch.inf, -torch.inf, 1e30
    flat = flat.to(dtype).to(device)
    if dtype == torch.float64:
        flat[9::1009] = 1e300  # infinite in the float32 of all arithmetic
    units = torch.rand(chunks.num_chunks, generator=generator) / levels
    units[3::11], units[4::13] = 0.0, torch.nan
    shifts = torch.rand(chunks.num_chunks, generator=generator)
    grid = Grid(units.to(device), shifts.to(device), low, levels)
    codes, plain = (torch.full((flat.numel(),), 7, dtype=grid.dtype, device=device) for _ in range(2))
    finite = shared_grid.encode(flat, chunks, grid, 11, codes)
    assert torch.equal(finite, shared_grid.encode(flat, chunks, grid, 11, plain, reference=True))
    assert torch.equal(codes, plain)
    assert codes.max() <= levels
    assert finite.all() == flat.float().isfinite().all()
    # As far as values are inside of the grid, codes stand for them.
    width = units[chunks.chunk_of_element().cpu()]
    lowest = low * width - shifts[chunks.chunk_of_element().cpu()]
    inside = (flat.cpu() >= lowest) & (flat.cpu() <= lowest + levels * width) & (width > 0)
    out, plainly = torch.full((2, flat.numel()), 7.0, dtype=dtype, device=device)
    shared_grid.decode(codes, 1, chunks, grid, out)
    if dtype == torch.float32:
        assert ((out.cpu() - flat.cpu()).abs() <= 1.001 * width)[inside].all()
    lanes = Lanes(flat.numel(), levels, COUNT)
    numbers = new_numbers(lanes, grid.dtype, flat.device)
    numbers[: len(codes)] = codes
    assert not numbers[len(codes) :].any()
    words = pack(lanes, numbers)
    assert torch.equal(words, pack(lanes, numbers, reference=True))
    first = sum(int(code) << 8 * lane for lane, code in enumerate(codes[:8]))
    assert not lanes.are_bytes or int(words[0]) & (2**64 - 1) == first
    sums = unpack(lanes, COUNT * words)
    assert torch.equal(sums, unpack(lanes, COUNT * words, reference=True))
    assert torch.equal(sums.int(), COUNT * codes.int())
    squares = shared_grid.decode(sums, COUNT, chunks, grid, out)
    assert torch.equal(squares, shared_grid.decode(sums, COUNT, chunks, grid, plainly, reference=True))
    assert int(squares.sum()) == int((sums.long() + COUNT * low).square().sum())
    assert bits(out.cpu().nan_to_num(nan=1e4)) == bits(plainly.cpu().nan_to_num(nan=1e4))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("low", "levels"), GRIDS)
def test_on_a_cpu(sizes: tuple[int, ...], low: int, levels: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert_grids_agree(sizes, low, levels, dtype, "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("low", "levels"), GRIDS)
def test_on_a_gpu(low: int, levels: int) -> None:
    assert has_faster("shared_grid", "cuda")
    assert has_faster("lanes", "cuda")
    for sizes in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            assert_grids_agree(sizes, low, levels, dtype, "cuda")
