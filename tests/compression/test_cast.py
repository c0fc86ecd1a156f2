"""fp16 and bf16 against numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import Bf16, Compressor, Fp16
from laconic.core.in_process import InProcessCluster, InProcessTransport
from tests.compression.test_laws import exchange, one_bucket, values


def round_to_bf16(array: np.ndarray) -> np.ndarray:
    """Round fp32 to the nearest value whose lower 16 bits are zero, ties to even; by integer arithmetic."""
    whole = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def round_to_fp16(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("compressor", "round_off"), [(Fp16(), round_to_fp16), (Bf16(), round_to_bf16)], ids=["fp16", "bf16"]
)
def test_formula(compressor: Compressor, round_off, world_size: int) -> None:
    """decoded = widen(sum of round(g_i)), where every partial sum is rounded too."""
    bucket = one_bucket(10_007, torch.float32)

    def rank(transport: InProcessTransport) -> np.ndarray:
        flat = values(transport.rank, 0, bucket.numel, bucket.dtype)
        exchange(compressor, flat, compressor.init(bucket), transport)
        return flat.numpy()

    expected = round_off(values(0, 0, bucket.numel, bucket.dtype).numpy())
    for other in range(1, world_size):
        expected = round_off(expected + round_off(values(other, 0, bucket.numel, bucket.dtype).numpy()))
    for found in InProcessCluster(world_size).run(rank):
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def _alone(compressor: Compressor, value: float) -> float:
    flat = torch.tensor([value])
    bucket = one_bucket(1, torch.float32)
    exchange(compressor, flat, compressor.init(bucket), InProcessCluster(1).transport(0))
    return flat.item()


def test_ranges() -> None:
    assert _alone(Fp16(), 65504.0) == 65504.0
    assert _alone(Fp16(), 65536.0) == float("inf"), "beyond the largest fp16 values become infinite, as documented"
    assert _alone(Fp16(), 1e-8) == 0.0
    assert _alone(Bf16(), 3e38) == pytest.approx(3e38, rel=2**-8)
    assert _alone(Bf16(), 1e-38) == pytest.approx(1e-38, rel=2**-8)


def test_precision() -> None:
    assert _alone(Fp16(), 1 + 2**-10) == 1 + 2**-10
    assert _alone(Fp16(), 1 + 2**-11) == 1.0, "11 significant bits, ties to even"
    assert _alone(Bf16(), 1 + 2**-7) == 1 + 2**-7
    assert _alone(Bf16(), 1 + 2**-8) == 1.0, "8 significant bits, ties to even"


@pytest.mark.parametrize("compressor", [Fp16(), Bf16()], ids=str)
def test_a_gradient_that_has_the_type_already_is_sent_in_place(compressor: Fp16 | Bf16) -> None:
    flat = values(0, 0, 100, compressor.wire_dtype)
    payload = compressor.encode(flat, compressor.init(one_bucket(100, compressor.wire_dtype)))
    assert payload.tensors[0] is flat
