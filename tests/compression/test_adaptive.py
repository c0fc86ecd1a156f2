"""adaptive: `first` in windows after which the norm of what arrived has changed much, the wrapped method in others."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import laconic
from laconic.compression import Adaptive, ErrorFeedback, NoCompression, PowerSgd, TopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits, exchange, values
from tests.runtime.replicas import mlp, mlp_loss

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (40, 50)), TensorSpec("bias", (7,))))
SIZES = (1.0, 1.0, 1.1, 1.2, 3.0, 3.0, 2.0, 0.5, 0.5, 0.5)
"""What gradients of each window are multiplied by."""


def gradient(rank: int, window: int) -> torch.Tensor:
    """Of one direction, so that norms of windows are as the sizes are."""
    return SIZES[window] * values(rank, 0, BUCKET.numel, BUCKET.dtype)


def critical_windows(change: float) -> list[bool]:
    """By the formula, from the sizes alone."""
    norms = [0.0, 0.0, *SIZES]
    return [before == 0 or abs(last - before) >= change * before for before, last in pairwise(norms)][: len(SIZES)]


@pytest.mark.parametrize("change", [0.15, 0.5])
@pytest.mark.parametrize("period", [1, 3])
def test_the_phase_follows_the_norm_of_what_arrived(change: float, period: int) -> None:
    gentle, hard = NoCompression(), TopK(density=0.9)
    compressor = Adaptive(hard, change=change, period=period)

    def rank(transport: InProcessTransport) -> list[bool]:
        state, found = compressor.init(BUCKET), []
        for step in range(period * len(SIZES)):
            flat, expected = gradient(transport.rank, step // period), gradient(0, step // period)
            expected += gradient(1, step // period)
            exchange(compressor, flat, state, transport, step=step)
            found.append(bool(torch.equal(flat, expected)))
            assert found[-1] or int(flat.count_nonzero()) < BUCKET.numel
        return found

    assert any(critical_windows(change)[2:])
    assert not all(critical_windows(change))
    for found in InProcessCluster(2).run(rank):
        assert found == [critical for critical in critical_windows(change) for _ in range(period)]
    assert str(gentle) == str(compressor.first)


def test_bytes_are_bounded_by_the_compressor_that_sends_more() -> None:
    for method, first in ((TopK(density=0.01), NoCompression()), (TopK(density=0.9), TopK(density=0.01))):
        compressor = Adaptive(method, first=first)
        heavier = first if isinstance(first, NoCompression) else method
        assert compressor.rounds(BUCKET, Moment.steady(4)) == heavier.rounds(BUCKET, Moment.steady(4))
    assert Adaptive(PowerSgd()).num_waits(BUCKET, Moment.steady(4)) == 2
    assert not Adaptive(TopK()).traits.exact_bytes


@pytest.mark.parametrize("stop", [3, 4, 7])
def test_a_saved_phase_goes_on_bit_for_bit(stop: int) -> None:
    """In the middle of a window and at its end, in critical phases and in others."""
    compressor = ErrorFeedback(Adaptive(TopK(density=0.1), first=TopK(density=0.5), period=2))

    def rank(transport: InProcessTransport) -> None:
        original = compressor.init(BUCKET)
        for step in range(stop):
            exchange(compressor, gradient(transport.rank, step), original, transport, step=step)
        restored = compressor.init(BUCKET)
        restored.restore(original.by_parameter())
        for step in range(stop, len(SIZES)):
            flats = []
            for state in (original, restored):
                flats.append(gradient(transport.rank, step))
                exchange(compressor, flats[-1], state, transport, step=step)
            assert bits(flats[0]) == bits(flats[1])

    InProcessCluster(2).run(rank)


def test_a_session_sends_less_once_gradients_settle() -> None:
    """With a rate of zero gradients of the same data never change, so only the first windows are critical."""

    def rank(transport: InProcessTransport) -> list[int]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        counted: list[int] = []
        strategy = "bsp / all_reduce / topk(0.01) + adaptive(period=2) / fusion"
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for _ in range(6):
                before, bound = session.traffic.sent_bytes("payload"), session.predicted_bytes_per_step()
                mlp_loss(model, 0, transport.rank).backward()
                counted.append(session.traffic.sent_bytes("payload") - before)
                assert counted[-1] <= bound
                optimizer.step()
                optimizer.zero_grad()
        return counted

    counted = laconic.InProcessCluster(2).run(rank)[0]
    assert len(set(counted[:4])) == 1
    assert max(counted[4:]) < counted[0] / 10
