"""Bytes per step from formulas alone, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from laconic.core.moment import Moment
from laconic.core.plan import Plan
from laconic.core.tensor import TensorSpec
from laconic.strategy import Strategy

# 3 MiB, 2 MiB, 4 bytes, 2 MiB of another dtype.
TENSORS = [
    TensorSpec("a", (1024, 768)),
    TensorSpec("b", (1024, 512)),
    TensorSpec("c", ()),
    TensorSpec("d", (1024, 1024), torch.bfloat16),
]
FP32 = 5 * 1024**2 + 4
BF16 = 2 * 1024**2


@pytest.mark.parametrize(
    ("text", "world_size", "expected"),
    [
        ("bsp", 1, 0),
        ("bsp / all_reduce / bf16 / wfbp", 1, 0),
        ("bsp", 2, FP32 + BF16),
        ("bsp / all_reduce / none / sequential", 2, FP32 + BF16),
        ("bsp / all_reduce / none / wfbp", 2, FP32 + BF16),
        ("bsp / all_reduce / fp16", 2, FP32 // 2 + BF16),
        ("bsp / all_reduce / bf16 + error_feedback", 2, FP32 // 2 + BF16),
        ("bsp / all_reduce / none / sequential", 4, (FP32 + BF16) * 3 // 2),
        # 2 (n-1)/n N is not whole here; every bucket is rounded up by itself.
        ("bsp / all_reduce / none / sequential", 3, -(-4 * FP32 // 3) + -(-4 * BF16 // 3)),
        ("bsp / all_reduce / none / wfbp", 3, 4 * 1024**2 + -(-4 * 2 * 1024**2 // 3) * 2 + 6),
    ],
)
def test_wire_bytes_per_step(text: str, world_size: int, expected: int) -> None:
    assert Strategy.parse(text).wire_bytes_per_step(TENSORS, world_size) == expected
    assert Strategy.parse(text).wire_bytes_per_step(iter(TENSORS), world_size) == expected


def test_bucket_bytes_add_up() -> None:
    strategy = Strategy.parse("bsp / all_reduce / fp16 / fusion(1MiB)")
    plan = strategy.plan(TENSORS)
    assert len(plan.buckets) > 2
    parts = [strategy.plan_bytes_per_step(Plan((bucket,)), Moment.steady(3)) for bucket in plan.buckets]
    assert sum(parts) == strategy.wire_bytes_per_step(TENSORS, 3)


def test_nothing_to_send() -> None:
    assert Strategy().wire_bytes_per_step([], 4) == 0
