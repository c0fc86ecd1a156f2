"""Count sketches: fused kernels give the cells and estimates of plain torch."""

from __future__ import annotations

import pytest
import torch

from laconic.compression.kernels.count_sketch import estimated, sketched
from laconic.compression.kernels.loader import has_faster

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def assert_sketches_agree(numel: int, rows: int, columns: int, device: str) -> None:
    generator = torch.Generator().manual_seed(numel + rows)
    # Sums of whole numbers are the same in every order.
    values = torch.randint(-1000, 1000, (numel,), generator=generator).float().to(device)
    seeds = torch.randint(0, 2**32, (rows,), generator=generator).to(device)
    cells = sketched(values, seeds, columns)
    assert torch.equal(cells, sketched(values, seeds, columns, reference=True))
    assert torch.equal(estimated(cells, seeds, numel), estimated(cells, seeds, numel, reference=True))
    cells[:: max(1, columns // 3)] = torch.nan
    cells[1 :: max(2, columns // 3)] = torch.inf
    fused, plain = (estimated(cells, seeds, numel, reference=reference) for reference in (False, True))
    assert torch.equal(fused.nan_to_num(nan=1e9), plain.nan_to_num(nan=1e9))
    assert torch.equal(fused.isnan(), plain.isnan())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 15])
@pytest.mark.parametrize(("numel", "columns"), [(1, 1), (1000, 7), (30_000, 900)])
def test_on_a_cpu(numel: int, rows: int, columns: int) -> None:
    assert_sketches_agree(numel, rows, columns, "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 15])
def test_on_a_gpu(rows: int) -> None:
    assert has_faster("count_sketch", "cuda")
    for numel, columns in ((1, 1), (1000, 7), (3_000_000, 90_000)):
        assert_sketches_agree(numel, rows, columns, "cuda")
