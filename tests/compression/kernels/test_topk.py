"""The k largest magnitudes: every kernel gives the same indices, whatever the values look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.compression.kernels.loader import load_kernels
from laconic.compression.kernels.numba_cpu import topk as numba_cpu
from laconic.compression.kernels.reference import topk as reference

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
KERNELS = (reference, numba_cpu)
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "numba"])


def largest_first(values: torch.Tensor) -> np.ndarray:
    """Indices by magnitude: NaN above infinity, then large before small, then first before last."""
    magnitudes = values.double().abs().numpy()
    return np.lexsort((np.arange(len(magnitudes)), -np.nan_to_num(magnitudes, nan=0.0), ~np.isnan(magnitudes)))


def by_sorting(values: torch.Tensor, k: int) -> list[int]:
    return sorted(largest_first(values)[:k].tolist())


KINDS = {
    "normal": lambda numel, generator: torch.randn(numel, generator=generator),
    "few values": lambda numel, generator: torch.randint(-3, 4, (numel,), generator=generator).float(),
    "mostly zero": lambda numel, generator: torch.where(
        torch.rand(numel, generator=generator) < 0.01, torch.randn(numel, generator=generator), 0.0
    ),
    "equal": lambda numel, generator: torch.full((numel,), -2.5),
    "zero": lambda numel, generator: torch.zeros(numel),
    "ascending": lambda numel, generator: torch.arange(numel).float(),
    "tiny and huge": lambda numel, generator: 10 ** (60 * torch.rand(numel, generator=generator) - 40),
    "not all finite": lambda numel, generator: torch.where(
        torch.rand(numel, generator=generator) < 0.1,
        torch.tensor([float("nan"), float("inf"), -float("inf")])[torch.arange(numel) % 3],
        torch.randn(numel, generator=generator),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_against_a_sort(kind: str) -> None:
    for dtype in DTYPES:
        for numel in (1, 2, 37, 2049, 70_001):
            values = KINDS[kind](numel, torch.Generator().manual_seed(numel)).to(dtype)
            order = torch.from_numpy(largest_first(values))
            for k in {0, 1, numel // 100, numel // 3, numel - 1, numel}:
                expected = order[:k].sort().values
                for kernel in KERNELS:
                    found = kernel.topk_indices(values, k)
                    assert found.dtype == torch.int64
                    assert torch.equal(found, expected), f"{kernel.__name__}: {dtype}, {k} of {numel}"


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_on_many_values(kind: str) -> None:
    values = KINDS[kind](400_000, torch.Generator().manual_seed(1))
    for k in (1, 399, 4000, 150_000):
        assert torch.equal(numba_cpu.topk_indices(values, k), reference.topk_indices(values, k)), k


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.data())
def test_kernels_agree_on_anything(numbers: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(numbers)))
    values = torch.tensor(numbers)
    expected = by_sorting(values, k)
    assert reference.topk_indices(values, k).tolist() == expected
    assert numba_cpu.topk_indices(values, k).tolist() == expected
    row = values.unsqueeze(0)
    assert reference.topk_of_rows(row, k).tolist() == [expected]
    assert numba_cpu.topk_of_rows(row, k).tolist() == [expected]


@every_kernel
def test_rows(kernel) -> None:
    for dtype in DTYPES:
        values = torch.randint(-20, 20, (50, 31), generator=torch.Generator().manual_seed(3)).to(dtype)
        values[7] = 0
        values[8, 3] = float("nan")
        for k in (0, 1, 5, 30, 31):
            found = kernel.topk_of_rows(values, k)
            assert found.tolist() == [by_sorting(row, k) for row in values]
    assert kernel.topk_of_rows(torch.empty(0, 5), 2).shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 31, 64, 4096, 5000])
def test_rows_on_a_gpu(dtype: torch.dtype, length: int) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randint(-20, 20, (200, length), generator=generator).to(dtype)
    values[7] = 0
    values[8, length // 2] = float("nan")
    values[9, 0] = -float("inf")
    kernels = load_kernels("topk", "cuda")
    for k in {0, 1, min(2, length), min(64, length), length // 2}:
        found = kernels.topk_of_rows(values.cuda(), k)
        assert torch.equal(found.cpu(), reference.topk_of_rows(values, k)), k


def test_a_part_of_a_tensor() -> None:
    """Places count from the beginning of the part, wherever it lies in memory."""
    values = torch.tensor([9.0, 1.0, -3.0, 2.0, 9.0])
    assert numba_cpu.topk_indices(values[1:4], 2).tolist() == [1, 2]
    assert numba_cpu.topk_indices(values[::2], 2).tolist() == [0, 2]
