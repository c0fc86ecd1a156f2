"""u = m u + g, send C(u): against numpy, and against momentum in the optimizer where nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.compression import ErrorFeedback, Fp16, MomentumCorrection
from laconic.core.in_process import InProcessCluster, InProcessTransport
from tests.compression.test_cast import round_to_fp16
from tests.compression.test_laws import exchange, one_bucket, values
from tests.runtime.replicas import mlp, train

BUCKET = one_bucket(997, torch.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_formula_around_error_feedback(world_size: int) -> None:
    compressor, steps, momentum = MomentumCorrection(ErrorFeedback(Fp16()), momentum=0.75), 6, np.float32(0.75)

    def one_rank(transport: InProcessTransport) -> list[np.ndarray]:
        state, found = compressor.init(BUCKET), []
        for step in range(steps):
            flat = values(transport.rank, step, BUCKET.numel, BUCKET.dtype)
            exchange(compressor, flat, state, transport, step=step)
            found.append(flat.numpy().copy())
        return found

    found = InProcessCluster(world_size).run(one_rank)
    velocity, error = np.zeros((2, world_size, BUCKET.numel), np.float32)
    for step in range(steps):
        total = np.zeros(BUCKET.numel, np.float32)
        for other in range(world_size):
            velocity[other] = momentum * velocity[other] + values(other, step, BUCKET.numel, BUCKET.dtype).numpy()
            owed = velocity[other] + error[other]
            error[other] = owed - round_to_fp16(owed)
            total = round_to_fp16(total + round_to_fp16(owed))
        for results in found:
            # A multiplication and an addition may be rounded once or twice.
            np.testing.assert_allclose(results[step], total, rtol=2e-3, atol=1e-6)


def test_where_nothing_is_lost_it_is_the_optimizers_momentum() -> None:
    def optimizer(momentum: float):
        return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    inside = train(
        mlp(), "bsp / all_reduce / none + momentum_correction(momentum=0.8)", make_optimizer=optimizer(0.0), steps=6
    )
    outside = train(mlp(), "bsp", make_optimizer=optimizer(0.8), steps=6)
    plain = train(mlp(), "bsp", make_optimizer=optimizer(0.0), steps=6)
    for name, value in inside[0].items():
        torch.testing.assert_close(value, outside[0][name])
        assert not torch.allclose(value, plain[0][name])


def test_what_is_not_finite_is_sent_once_and_not_remembered() -> None:
    compressor = MomentumCorrection(Fp16(), momentum=0.5)
    bucket = one_bucket(3, torch.float32)
    state, results = compressor.init(bucket), []
    for gradient in ([4.0, 4.0, 4.0], [float("inf"), float("nan"), 2.0], [0.0, 0.0, 0.0]):
        flat = torch.tensor(gradient)
        exchange(compressor, flat, state, InProcessCluster(1).transport(0))
        results.append(flat.tolist())
    assert results[1][0] == float("inf")
    assert results[1][1] != results[1][1]
    assert results[1][2] == 4.0
    assert results[2] == [2.0, 2.0, 2.0], "the velocity before the bad step, and the one after it where it was fine"
