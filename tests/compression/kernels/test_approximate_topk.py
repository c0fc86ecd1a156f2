"""Largest magnitudes, exactly and about: fused kernels choose what plain torch chooses, on every kind of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from laconic.compression.kernels import topk
from laconic.compression.kernels.approximate_topk import approximate_topk
from laconic.compression.kernels.loader import has_faster
from laconic.compression.kernels.numba_cpu import approximate_topk as numba_cpu
from laconic.compression.kernels.reference import approximate_topk as reference
from laconic.compression.kernels.reference import topk as exact_reference
from tests.compression.kernels.test_topk import KINDS as COMMON

pytestmark = pytest.mark.timeout(300)

SEED = 123456789
Maker = Callable[[int, torch.Generator], torch.Tensor]


def rows_of_zeros(numel: int, generator: torch.Generator) -> torch.Tensor:
    rows = torch.rand(numel // 64 + 1, generator=generator) < 0.05
    return torch.randn(numel, generator=generator) * rows.repeat_interleave(64)[:numel]


KINDS: dict[str, Maker] = {
    **COMMON,
    "one NaN": lambda numel, generator: torch.where(
        torch.arange(numel) == numel // 2, torch.nan, torch.randn(numel, generator=generator)
    ),
    "two values": lambda numel, generator: torch.where(torch.rand(numel, generator=generator) < 0.012, 1.0, 0.5),
    "rows of zeros": rows_of_zeros,
    "16 bits": lambda numel, generator: torch.randn(numel, generator=generator).bfloat16().float(),
    "unlike scales": lambda numel, generator: (
        torch.randn(numel, generator=generator) * torch.linspace(0, 1, numel) ** 8
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def cases(kind: str, sizes: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, int]]:
    for numel in sizes:
        values = KINDS[kind](numel, torch.Generator().manual_seed(numel))
        for k in sorted({0, 1, numel // 1000, numel // 100, numel // 10, numel // 3, numel - 1, numel}):
            if k in range(numel + 1):
                yield values, k


@every_kind
def test_estimates_on_a_cpu(kind: str) -> None:
    for values, k in cases(kind, (0, 1, 33, 16_383, 16_384, 100_003)):
        found = numba_cpu.approximate_topk(values, k, SEED)
        assert torch.equal(found, reference.approximate_topk(values, k, SEED)), f"{k} of {values.numel()}"


def test_estimates_of_other_types_and_of_parts() -> None:
    values = KINDS["normal"](60_000, torch.Generator().manual_seed(0))
    for typed in (values.double(), values.half(), values.bfloat16(), values[::2], values[1:]):
        assert torch.equal(approximate_topk(typed, 300, SEED), reference.approximate_topk(typed, 300, SEED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_kind
def test_on_a_gpu(kind: str) -> None:
    assert has_faster("topk", "cuda")
    sizes = (0, 1, 2, 31, 32, 33, 509, 16_384, 65_536, 65_537, 70_001, 1_000_003, 4_000_000)
    for values, k in cases(kind, sizes):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            there = values.to("cuda", dtype)
            what = f"{k} of {values.numel()}, {dtype}"
            found = topk.topk_indices(there, k)
            assert found.dtype == torch.int64
            assert torch.equal(found, exact_reference.topk_indices(there, k)), what
            assert torch.equal(approximate_topk(there, k, SEED), reference.approximate_topk(there, k, SEED)), what


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_parts_and_repetitions() -> None:
    """Wherever values lie in memory; and the same again, however programs took their turns."""
    values = KINDS["normal"](3_000_000, torch.Generator().manual_seed(0)).cuda()
    for part in (values[1:], values[3:2_000_002], values[::2], values.double()):
        assert torch.equal(topk.topk_indices(part, 20_000), exact_reference.topk_indices(part, 20_000))
    for select in (topk.topk_indices, lambda values, k: approximate_topk(values, k, SEED)):
        first = select(values, 30_000)
        assert all(torch.equal(select(values, 30_000), first) for _ in range(50))
