"""gtopk: S_r = topk(S_r + S_peer) in log2(n) rounds, against a simulation of all ranks by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from laconic.architecture.all_reduce import Everyone, round_sent
from laconic.compression import ErrorFeedback, GTopK, TopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits, exchange, values
from tests.compression.test_topk import LAYERS, largest

every_world_size = pytest.mark.parametrize("world_size", range(1, 9))

Held = tuple[np.ndarray, list[set[int]]]
"""Dense values, and for every rank which of its entries are counted in them."""


def merged(first: Held, second: Held, density: float) -> Held:
    values = largest(first[0] + second[0], LAYERS, density)
    # The k largest of the sum include zeros where entries cancelled out; nothing does in this test.
    kept = set(np.flatnonzero(values).tolist())
    return values, [(one | other) & kept for one, other in zip(first[1], second[1], strict=True)]


def simulated(gradients: list[np.ndarray], density: float) -> list[Held]:
    """What every rank ends with."""
    size = len(gradients)
    held: list[Held] = []
    for rank, gradient in enumerate(gradients):
        values = largest(gradient, LAYERS, density)
        counted = [set(np.flatnonzero(values).tolist()) if other == rank else set() for other in range(size)]
        held.append((values, counted))
    power = 2 ** int(math.log2(size))
    for guest in range(power, size):
        held[guest - power] = merged(held[guest - power], held[guest], density)
    distance = 1
    while distance < power:
        held = [merged(held[rank], held[rank ^ distance], density) for rank in range(power)] + held[power:]
        distance *= 2
    return [held[rank % power] for rank in range(size)]


def gradient(rank: int, step: int = 0) -> torch.Tensor:
    """Ranks differ, but not in everything: some entries are large on several."""
    return values(rank, step, LAYERS.numel, torch.float32) + values(rank // 2 + 50, step, LAYERS.numel, torch.float32)


@every_world_size
@pytest.mark.parametrize("density", [0.001, 0.05])
def test_against_a_simulation(world_size: int, density: float) -> None:
    compressor = GTopK(density=density)

    def rank(transport: InProcessTransport) -> tuple[np.ndarray, np.ndarray]:
        flat, own = gradient(transport.rank), torch.full((LAYERS.numel,), 7.0)
        state = BucketState(LAYERS, moment=Moment(0, transport.rank, world_size))
        for work in compressor.exchange(flat, state, Everyone(transport, "a bucket"), own):
            work.wait()
        return flat.numpy(), own.numpy()

    expected = simulated([gradient(other).numpy() for other in range(world_size)], density)
    found = InProcessCluster(world_size).run(rank)
    for other, (result, own) in enumerate(found):
        np.testing.assert_allclose(result, expected[other][0], rtol=1e-6)
        assert result.tobytes() == found[0][0].tobytes()
        counted = sorted(expected[other][1][other])
        assert np.flatnonzero(own).tolist() == counted, f"rank {other}"
        np.testing.assert_array_equal(own[counted], gradient(other).numpy()[counted])
    # What the ranks say they contributed is what there is.
    np.testing.assert_allclose(sum(own for _, own in found), found[0][0], rtol=1e-5, atol=1e-6)


@every_world_size
def test_bytes_and_waits(world_size: int) -> None:
    """2 k log2(n) numbers; guests send once, and their hosts once more than others."""
    compressor = GTopK(density=0.01, indices="int32")
    bucket = Bucket((TensorSpec("w", (10_000,)),))
    power = 2 ** int(math.log2(world_size))
    merges = int(math.log2(world_size))
    for rank in range(world_size):
        moment = Moment(5, rank, world_size)
        sent = sum(round_sent(round, world_size) for round in compressor.rounds(bucket, moment))
        answers = rank + power < world_size
        # 100 indices and values of 4 bytes; in an answer a bit for each of the guest's entries, 16 bytes in all.
        assert sent == (800 if rank >= power else 800 * merges + 816 * answers)
        assert compressor.num_waits(bucket, moment) == merges + (2 if world_size > power else 0)


@every_world_size
def test_with_error_feedback_nothing_is_lost(world_size: int) -> None:
    """What has arrived and what is still owed add up to all gradients, after every step."""
    compressor = ErrorFeedback(GTopK(density=0.02))
    steps = 5

    def rank(transport: InProcessTransport) -> tuple[np.ndarray, np.ndarray]:
        state, arrived = compressor.init(LAYERS), torch.zeros(LAYERS.numel)
        for step in range(steps):
            flat = gradient(transport.rank, step)
            exchange(compressor, flat, state, transport, step=step)
            arrived += flat
        return arrived.numpy(), state.flat["error_feedback.residual"].numpy()

    found = InProcessCluster(world_size).run(rank)
    given = sum(gradient(other, step).numpy() for other in range(world_size) for step in range(steps))
    owed = sum(residual for _, residual in found)
    np.testing.assert_allclose(found[0][0] + owed, given, rtol=1e-4, atol=1e-4)


def test_entries_that_cancel_out_leave_no_gap() -> None:
    compressor = GTopK(density=0.5)
    bucket = Bucket((TensorSpec("w", (4,)),))

    def rank(transport: InProcessTransport) -> list[float]:
        flat = torch.tensor([[3.0, 2.0, 0.0, 0.0], [-3.0, -2.0, 0.0, 0.0]][transport.rank])
        exchange(compressor, flat, compressor.init(bucket), transport)
        return flat.tolist()

    assert InProcessCluster(2).run(rank) == [[0.0, 0.0, 0.0, 0.0]] * 2


def test_one_rank_gets_what_topk_gives() -> None:
    flats = []
    for compressor in (GTopK(), TopK()):
        flats.append(gradient(0))
        exchange(compressor, flats[-1], compressor.init(LAYERS), InProcessCluster(1).transport(0))
    assert bits(flats[0]) == bits(flats[1])
