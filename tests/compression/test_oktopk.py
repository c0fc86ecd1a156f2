"""oktopk: decoded = topk(sum_i topk(g_i)), exact to the width of a bin, for less than 6 k numbers a rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.architecture.all_reduce import Everyone
from laconic.compression import Compressor, ErrorFeedback, GTopK, OkTopK, TopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from tests.compression.test_gtopk import gradient
from tests.compression.test_laws import bits, exchange, values
from tests.compression.test_topk import LAYERS, largest

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("density", [0.001, 0.05])
def test_formula(world_size: int, density: float) -> None:
    """What arrives are sums of entries, k of each tensor, and nothing much larger is left out."""
    compressor = OkTopK(density=density)

    def rank(transport: InProcessTransport) -> tuple[np.ndarray, np.ndarray]:
        flat, own = gradient(transport.rank), torch.full((LAYERS.numel,), 7.0)
        state = BucketState(LAYERS, moment=Moment(0, transport.rank, world_size))
        for work in compressor.exchange(flat, state, Everyone(transport, "a bucket"), own):
            work.wait()
        return flat.numpy(), own.numpy()

    sent = [largest(gradient(other).numpy(), LAYERS, density) for other in range(world_size)]
    total = np.zeros(LAYERS.numel, np.float32)
    for part in sent:
        total += part
    found = InProcessCluster(world_size).run(rank)
    result = found[0][0]
    arrived = result != 0
    np.testing.assert_array_equal(result[arrived], total[arrived])
    for _, place in LAYERS.segments():
        here, wanted = result[place], np.count_nonzero(largest(total, LAYERS, density)[place])
        assert np.count_nonzero(here) == wanted, "as many as the k largest sums"
        left_out = np.abs(np.where(here == 0, total[place], 0))
        if wanted:
            assert left_out.max() <= 1.125 * np.abs(here[here != 0]).min(), "bins are an eighth wide"
    for other, (flat, own) in enumerate(found):
        assert flat.tobytes() == result.tobytes()
        np.testing.assert_array_equal(own, np.where(arrived, sent[other], 0))


def hot_spot(rank: int, numel: int) -> torch.Tensor:
    """All large entries lie close together, and each rank has its own next to those of the others."""
    flat = 1e-3 * values(rank, 0, numel, torch.float32)
    begin = numel // 3 + 500 * rank
    flat[begin : begin + numel // 20] += 10 + values(rank + 20, 0, numel // 20, torch.float32)
    return flat


@pytest.mark.parametrize("place", ["everywhere", "close together"])
def test_the_transport_counts_less_than_6k_numbers_whatever_the_number_of_ranks(place: str) -> None:
    """And topk and gtopk send more, the more ranks there are."""
    bucket, density = Bucket((TensorSpec("weight", (300_000,)),)), 0.02
    kept = 6000

    def counted(compressor: Compressor, world_size: int) -> int:
        def rank(transport: InProcessTransport) -> int:
            flat = hot_spot(transport.rank, bucket.numel)
            if place == "everywhere":
                flat = values(transport.rank, 0, bucket.numel, bucket.dtype)
            exchange(compressor, flat, compressor.init(bucket), transport)
            return transport.traffic.sent_bytes("payload")

        return max(InProcessCluster(world_size).run(rank))

    volumes = {n: counted(OkTopK(density=density), n) for n in (2, 4, 8)}
    for n, volume in volumes.items():
        assert volume < 4 * 6 * kept * (n - 1) / n, f"{volume / 4 / kept:.2f} k numbers on {n} ranks"
    # topk sends (n-1) k entries and gtopk log2(n) k, oktopk at most 3 (n-1)/n k.
    assert counted(TopK(density=density), 8) > 2 * volumes[8]
    assert counted(GTopK(density=density), 8) > volumes[8]


def test_with_error_feedback_nothing_is_lost() -> None:
    compressor, steps = ErrorFeedback(OkTopK(density=0.02)), 5

    def rank(transport: InProcessTransport) -> tuple[np.ndarray, np.ndarray]:
        state, arrived = compressor.init(LAYERS), torch.zeros(LAYERS.numel)
        for step in range(steps):
            flat = gradient(transport.rank, step)
            exchange(compressor, flat, state, transport, step=step)
            arrived += flat
        return arrived.numpy(), state.flat["error_feedback.residual"].numpy()

    found = InProcessCluster(3).run(rank)
    given = sum(gradient(other, step).numpy() for other in range(3) for step in range(steps))
    owed = sum(residual for _, residual in found)
    np.testing.assert_allclose(found[0][0] + owed, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([3.0, 2.0, 0.0, 0.0], [-3.0, -2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ([1.0, 0.0, 0.0, 5.0], [0.0, 1.0, 0.0, 5.0], [1.0, 0.0, 0.0, 10.0]),
        ([1.0, 0.0, float("nan"), 0.0], [9.0, 0.0, 0.0, 0.0], [10.0, 0.0, float("nan"), 0.0]),
    ],
    ids=["cancelled out", "zeros", "equal: the first", "not a number"],
)
def test_entries_that_are_hard_to_order(left: list[float], right: list[float], expected: list[float]) -> None:
    compressor, bucket = OkTopK(density=0.5), Bucket((TensorSpec("w", (4,)),))

    def rank(transport: InProcessTransport) -> list[float]:
        flat = torch.tensor([left, right][transport.rank])
        exchange(compressor, flat, compressor.init(bucket), transport)
        return flat.tolist()

    for found in InProcessCluster(2).run(rank):
        np.testing.assert_array_equal(found, expected)


def test_one_rank_gets_what_topk_gives() -> None:
    flats = []
    for compressor in (OkTopK(), TopK()):
        flats.append(gradient(0))
        exchange(compressor, flats[-1], compressor.init(LAYERS), InProcessCluster(1).transport(0))
    assert bits(flats[0]) == bits(flats[1])
