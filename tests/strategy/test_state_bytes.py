"""Bytes of state are counted by shape; that is what adding them up one by one gives, also where names decide."""

from __future__ import annotations

import pytest

from laconic.compression import COMPRESSORS, Wrapper
from laconic.core.tensor import TensorSpec
from laconic.errors import LaconicError
from laconic.strategy import Strategy

TENSORS = [TensorSpec(f"{number}.{kind}", (24, 16)) for number in range(3) for kind in ("norm", "weight")]
TENSORS += [TensorSpec(f"{number}.bias", (7,)) for number in range(3)]
TEXTS = [
    'bsp / all_reduce / powersgd(rank=2) + error_feedback + per_layer(skip="*norm*")',
    "diloco / all_reduce / int8 + error_feedback",
    *(f"bsp / all_reduce / {method.name}" for method in COMPRESSORS if not issubclass(method, Wrapper)),
]


@pytest.mark.parametrize("text", TEXTS)
def test_equal_to_one_by_one(text: str) -> None:
    try:
        strategy = Strategy.parse(text)
    except LaconicError:
        pytest.skip("does not stand alone")
    assert strategy.state_bytes(TENSORS) == sum(strategy.state_bytes([tensor]) for tensor in TENSORS)
