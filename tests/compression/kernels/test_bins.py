"""Entries that reach the largest magnitude of their bin: fused kernels take what plain torch takes."""

from __future__ import annotations

import pytest
import torch

from laconic.compression.kernels.bins import take_reaching
from laconic.compression.kernels.loader import has_faster
from laconic.compression.wire.chunks import Chunks
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits

SIZES = [(1,), (37, 0, 5000, 64), (4096, 300_000)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def assert_both_take_the_same(sizes: tuple[int, ...], block: int, dtype: torch.dtype, device: str) -> None:
    specs = (TensorSpec(f"p{i}", (size,), dtype, torch.device(device)) for i, size in enumerate(sizes))
    bins = Chunks(Bucket(tuple(specs)), block, 8, 0)
    numel = bins.bucket.numel
    generator = torch.Generator().manual_seed(numel)
    fused, plain = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
    places, values = take_reaching(torch.zeros_like(fused), fused, bins)
    assert len(places) == len(values) == len(values.view(torch.uint8)) == 0, "of zeros nothing is taken"
    for step in range(4):
        flat = torch.randn(numel, generator=generator)
        flat[: numel // 10] = 0.0
        if step == 2:
            flat[5::9971], flat[6::11973], flat[7::12971] = torch.nan, torch.inf, -torch.inf
        flat = flat.to(dtype).to(device)
        places, values = take_reaching(flat, fused, bins)
        expected_places, expected = take_reaching(flat, plain, bins, reference=True)
        assert torch.equal(places, expected_places)
        assert values.dtype == expected.dtype
        assert bits(values.cpu().nan_to_num(nan=1e4)) == bits(expected.cpu().nan_to_num(nan=1e4))
        assert bits(fused.cpu()) == bits(plain.cpu())
        assert fused.isfinite().all()
        assert not fused[places].any()
        if step == 0 and numel > 1:
            assert 0 < len(places) < numel


def test_what_is_taken_of_a_bin() -> None:
    bins = Chunks(Bucket((TensorSpec("weight", (12,)),)), 4, 8, 0)
    residual = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    flat = torch.tensor([0.0, torch.inf, 2.0, 3.0, 1.0, 1.0, -0.5, 0.0, 0.0, torch.nan, 2.0, 3.0])
    places, values = take_reaching(flat, residual, bins)
    # 1 + 1 + 1 reaches 2.5 in the second bin, whose largest entry shrinks.
    assert places.tolist() == [1, 4, 8, 9, 10, 11]
    assert values[3].isnan()
    assert values[[0, 1, 2, 4, 5]].tolist() == [torch.inf, 2.0, 0.0, 2.0, 3.0]
    assert residual.tolist() == [0.0, 0.0, 2.0, 3.0, 0.0, 1.0, 2.5, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("block", [4, 50, 64, 500])
def test_on_a_cpu(sizes: tuple[int, ...], block: int) -> None:
    # The kernel is for float32; other dtypes are left to plain torch.
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert_both_take_the_same(sizes, block, dtype, "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block", [4, 50, 64, 500, 1000, 65536])
def test_on_a_gpu(block: int) -> None:
    assert has_faster("bins", "cuda")
    for sizes in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            assert_both_take_the_same(sizes, block, dtype, "cuda")
