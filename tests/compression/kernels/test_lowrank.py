"""Thin matrices: fused kernels agree with plain torch and with float64, and bases are bases."""

from __future__ import annotations

import pytest
import torch

from laconic.compression.kernels import lowrank
from laconic.compression.kernels.loader import has_faster
from laconic.compression.kernels.reference import lowrank as reference

pytestmark = pytest.mark.timeout(300)

SHAPES = [(5000, 5000), (4099, 1031), (140, 30_011), (30_011, 140), (2, 2_100_000), (300_000, 15), (70, 90)]
"""All but the last are large enough for fused kernels; more rows than a grid has programs in its second dimension."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def thin(rows: int, columns: int, rank: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """M, P and Q^T."""
    generator = torch.Generator().manual_seed(rows + rank)
    shapes = ((rows, columns), (rows, rank), (rank, columns))
    matrix, p, q = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return matrix, p, q


def assert_products(rows: int, columns: int, rank: int, device: str) -> None:
    matrix, p, q = thin(rows, columns, rank, device)
    wide, wide_p, wide_q = matrix.double(), p.double(), q.double()
    out = torch.full_like(p, torch.nan)
    lowrank.times_right(matrix, q, out)
    assert_near(out, wide @ wide_q.t())
    out = torch.full_like(q, torch.nan)
    lowrank.times_left(matrix, p, out)
    assert_near(out, wide_p.t() @ wide)
    out = torch.full_like(matrix, torch.nan)
    lowrank.product(p, q, out)
    assert_near(out, wide_p @ wide_q)
    rounded = torch.full_like(matrix, torch.nan, dtype=torch.bfloat16)
    lowrank.product(p, q, rounded)
    torch.testing.assert_close(rounded.float(), out, rtol=2**-7, atol=1e-4)


def assert_near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """By float32 arithmetic, if sums are long: TF32 would be fifty times further away."""
    assert torch.linalg.norm(found - exact) <= 1e-5 * torch.linalg.norm(exact)


def test_products_on_a_cpu() -> None:
    for rank in (1, 3, 4):
        assert_products(67, 129, rank, "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_on_a_gpu(shape: tuple[int, int]) -> None:
    assert has_faster("lowrank", "cuda")
    for rank in (1, 2, 3, 4, 5, 8, 16, 20):
        assert_products(*shape, rank, "cuda")


@pytest.mark.gpu
@needs_gpu
def test_what_is_not_finite_spreads_on_a_gpu() -> None:
    matrix, p, q = thin(2100, 2000, 4, "cuda")
    matrix[7, 3] = torch.inf
    out = torch.empty_like(p)
    lowrank.times_right(matrix, q, out)
    assert (~out.isfinite()).sum(1).nonzero().view(-1).tolist() == [7]
    basis = lowrank.orthonormal(out.unsqueeze(0), torch.rand_like(p) - 0.5)
    assert basis.isnan().all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 7, 16, 17])
@pytest.mark.parametrize("batch", [1, 3, 700])
def test_bases_on_a_gpu(batch: int, rank: int) -> None:
    """Orthonormal whatever the columns are, and spanning them; the reference's, if no column depends on others."""
    for rows in (rank + 1, 70, 5000) if batch < 700 else (70,):
        generator = torch.Generator().manual_seed(rows)
        noise = (torch.rand(rows, rank, generator=generator) - 0.5).cuda()
        full = torch.randn(batch, rows, rank, generator=generator).cuda()
        torch.testing.assert_close(
            lowrank.orthonormal(full, noise), reference.orthonormal(full, noise), atol=2e-6, rtol=0
        )
        for columns in (full, full[..., :1].expand_as(full), full * 1e-30, full * 1e30, torch.zeros_like(full)):
            basis = lowrank.orthonormal(columns, noise).double()
            unit = torch.eye(rank, device="cuda").double().expand(batch, -1, -1)
            torch.testing.assert_close(basis.mT @ basis, unit, atol=1e-6, rtol=0)
            missed = torch.linalg.norm(columns - basis @ (basis.mT @ columns.double()))
            assert missed <= 2e-6 * torch.linalg.norm(columns.double())
        again = lowrank.orthonormal(full, noise)
        assert all(torch.equal(lowrank.orthonormal(full, noise), again) for _ in range(10))
