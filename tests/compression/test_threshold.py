"""threshold: m = |g| > tau, decoded = m * g; as many bytes as the fullest rank needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import ErrorFeedback, Threshold
from laconic.compression.wire.indices import indices_bytes
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from tests.compression.test_laws import exchange, one_bucket, values

NUMEL = 4001


@pytest.mark.parametrize("indices", ["auto", "int32", "int16", "bitmap", "packed"])
@pytest.mark.parametrize("tau", [1e-6, 0.05, 0.5, 100.0])
@pytest.mark.parametrize("world_size", [1, 3])
def test_formula_and_bytes(tau: float, indices: str, world_size: int) -> None:
    compressor = Threshold(tau=tau, indices=indices)
    bucket = one_bucket(NUMEL, torch.float32)

    def gradient(rank: int) -> torch.Tensor:
        return values(rank, 0, NUMEL, torch.float32) * (1 + rank)  # ranks send different amounts

    def rank(transport: InProcessTransport) -> tuple[np.ndarray, int]:
        flat = gradient(transport.rank)
        exchange(compressor, flat, compressor.init(bucket), transport)
        return flat.numpy(), transport.traffic.sent_bytes("payload")

    expected, sizes = np.zeros(NUMEL, np.float32), []
    for other in range(world_size):
        mine = gradient(other).numpy()
        expected += np.where(np.abs(mine) > np.float32(tau), mine, 0)
        count = int((np.abs(mine) > np.float32(tau)).sum())
        sizes.append(indices_bytes(NUMEL, count, indices) + 4 * count)
    for found, sent in InProcessCluster(world_size).run(rank):
        np.testing.assert_array_equal(found, expected)
        assert sent == (world_size - 1) * (4 + max(sizes))


@pytest.mark.parametrize("indices", ["auto", "int32", "int16", "bitmap", "packed"])
@pytest.mark.parametrize("numel", [1, 2, 7, 999, 70_001])
def test_the_bound_holds_whatever_is_sent(indices: str, numel: int) -> None:
    compressor = Threshold(indices=indices)
    counts, payload = compressor.rounds(one_bucket(numel, torch.float32), Moment.steady(4))
    assert counts.sizes == (4,)
    for count in {0, 1, numel // 2, numel - 1, numel}:
        assert compressor._bytes(numel, count) <= payload.sizes[0]
    assert not compressor.traits.exact_bytes


def test_the_threshold_itself_is_not_above_it() -> None:
    compressor = Threshold(tau=0.5)
    flat = torch.tensor([0.5, -0.5, 0.75, -0.75, 0.0])
    exchange(compressor, flat, compressor.init(one_bucket(5, torch.float32)), InProcessCluster(1).transport(0))
    assert flat.tolist() == [0.0, 0.0, 0.75, -0.75, 0.0]


def test_with_error_feedback_small_values_are_sent_when_they_have_added_up() -> None:
    compressor = ErrorFeedback(Threshold(tau=1.0))
    state, transport = compressor.init(one_bucket(1, torch.float32)), InProcessCluster(1).transport(0)
    sent = []
    for step in range(8):
        flat = torch.tensor([0.375])
        exchange(compressor, flat, state, transport, step=step)
        sent.append(flat.item())
    assert sent == [0.0, 0.0, 1.125, 0.0, 0.0, 1.125, 0.0, 0.0]
