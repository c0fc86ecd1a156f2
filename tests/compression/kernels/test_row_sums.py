"""Sums of rows: a fused kernel gives the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

from laconic.compression.kernels.loader import has_faster
from laconic.compression.kernels.row_sums import sum_of_rows
from tests.compression.test_laws import bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def assert_sums(device: str) -> None:
    for numel in (0, 1, 17, 5000):
        for count in (1, 2, 5):
            wide = torch.randn(count, numel + 3, generator=torch.Generator().manual_seed(numel)) * 1e3
            wide[:, 1::7] = torch.inf
            for dtype in DTYPES:
                rows = wide.to(dtype).to(device)[:, 1:-2]
                for summed in DTYPES:
                    out, plain = torch.full((2, numel), 7.0, dtype=summed, device=device)
                    sum_of_rows(rows, out)
                    sum_of_rows(rows, plain, reference=True)
                    expected = torch.zeros(numel, dtype=summed, device=device)
                    for row in rows:
                        expected += row.to(summed)
                    assert bits(out.cpu()) == bits(plain.cpu())
                    assert torch.equal(out, expected)


def test_on_a_cpu() -> None:
    assert_sums("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    assert has_faster("row_sums", "cuda")
    assert_sums("cuda")
