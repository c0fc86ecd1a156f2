"""scalecom: one rank's largest entries, another rank in every round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.architecture.all_reduce import round_sent
from laconic.compression import DctCyclic, ErrorFeedback, ScaleCom, TopK
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import exchange, values

pytestmark = pytest.mark.timeout(60)
BUCKET = Bucket((TensorSpec("weight", (20, 30)), TensorSpec("bias", (50,))))
PLACES = (slice(0, 600), slice(600, 650))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_formula(world_size: int) -> None:
    method = ScaleCom(density=0.05)

    def rank(transport: InProcessTransport) -> list[torch.Tensor]:
        found, state = [], method.init(BUCKET)
        for step in range(4):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(method, flat, state, transport, step=step)
            found.append(flat)
        return found

    found = InProcessCluster(world_size).run(rank)[0]
    for step in range(4):
        inputs = [values(rank, step, BUCKET.numel, BUCKET.dtype).numpy() for rank in range(world_size)]
        expected = np.zeros(BUCKET.numel, np.float32)
        for place in PLACES:
            leader = inputs[step % world_size][place]
            chosen = np.argsort(-np.abs(leader))[: int(np.ceil(0.05 * leader.size))] + place.start
            for one in inputs:
                expected[chosen] += one[chosen]
        assert np.array_equal(found[step].numpy(), expected)


@pytest.mark.parametrize("method", [ScaleCom(density=0.1), DctCyclic(density=0.1)], ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_residual_is_kept_of_what_others_did_not_choose(method: ScaleCom | DctCyclic, world_size: int) -> None:
    """Over the steps everything arrives: what was put in is what came out and what ranks still hold."""

    def rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        compressor = ErrorFeedback(method)
        state, out = compressor.init(BUCKET), torch.zeros(BUCKET.numel)
        for step in range(6):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(compressor, flat, state, transport, step=step)
            out += flat
        return out, state.flat["error_feedback.residual"]

    found = InProcessCluster(world_size).run(rank)
    put_in = sum(values(rank, step, BUCKET.numel, BUCKET.dtype) for rank in range(world_size) for step in range(6))
    assert torch.allclose(found[0][0] + sum(residual for _, residual in found), put_in, atol=1e-4)


def test_bytes_do_not_grow_with_ranks() -> None:
    bucket = Bucket((TensorSpec("weight", (1000, 100)),))

    def sent(method: ScaleCom | TopK, world_size: int) -> int:
        return sum(round_sent(round, world_size) for round in method.rounds(bucket, Moment.steady(world_size)))

    assert sent(ScaleCom(), 64) < 2 * sent(ScaleCom(), 2)
    assert sent(TopK(), 64) > 30 * sent(TopK(), 2)
