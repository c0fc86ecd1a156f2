"""Randomized Hadamard transforms: fused kernels give the bits of plain torch, and backward undoes forward."""

from __future__ import annotations

import pytest
import torch

from laconic.compression.kernels.loader import has_faster
from laconic.compression.kernels.rotation import backward, forward
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
    rotated, squares = forward(flat, rotation, SEED)
    plain, plainly = forward(flat, rotation, SEED, reference=True)
    assert bits(rotated.cpu()) == bits(plain.cpu())
    assert torch.allclose(squares, plainly, rtol=1e-12)
    assert float(squares.sum()) == pytest.approx(float(flat.double().square().sum()), rel=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        again, plain = torch.full((2, flat.numel()), 7.0, dtype=dtype, device=device)
        backward(rotated, rotation, SEED, again)
        backward(rotated, rotation, SEED, plain, reference=True)
        assert bits(again.cpu()) == bits(plain.cpu())
        assert torch.allclose(again.float(), flat, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("block", [32, 1024, 1500, 65536])
def test_on_a_cpu(block: int) -> None:
    for sizes in SIZES:
        assert_rotations_agree(sizes, block, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("block", [32, 1024, 1500, 65536])
def test_on_a_gpu(block: int) -> None:
    assert has_faster("rotation", "cuda")
    for sizes in SIZES:
        assert_rotations_agree(sizes, block, "cuda")
