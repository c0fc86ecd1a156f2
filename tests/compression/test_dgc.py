"""dgc: u = m u + g, v = v + u, send the largest of v, forget there both u and v."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from laconic.compression import Dgc
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination
from laconic.strategy import Strategy
from tests.compression.test_laws import exchange, values
from tests.compression.test_topk import LAYERS, largest


def warmed(step: int, steps: int, density: float) -> float:
    quarter = [0.25, 0.0625, 0.015625, 0.00390625, 0.0]
    return max(density, quarter[min(4, 4 * step // steps)] if step < steps else 0.0)


@pytest.mark.parametrize("clip_norm", [0.0, 2.0])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_formula(world_size: int, clip_norm: float) -> None:
    compressor = Dgc(density=0.01, momentum=0.5, clip_norm=clip_norm, warmup_steps=6)
    steps = 9

    def rank(transport: InProcessTransport) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
        state, results = compressor.init(LAYERS), []
        for step in range(steps):
            flat = values(transport.rank, step, LAYERS.numel, torch.float32)
            exchange(compressor, flat, state, transport, step=step)
            results.append(flat.numpy().copy())
        return results, state.flat

    found = InProcessCluster(world_size).run(rank)
    velocity = np.zeros((world_size, LAYERS.numel), np.float32)
    unsent = np.zeros((world_size, LAYERS.numel), np.float32)
    for step in range(steps):
        total = np.zeros(LAYERS.numel, np.float32)
        for other in range(world_size):
            gradient = values(other, step, LAYERS.numel, torch.float32).numpy()
            for _, place in LAYERS.segments():
                norm = np.linalg.norm(gradient[place])
                bound = clip_norm / math.sqrt(world_size)
                if clip_norm and norm > bound:
                    gradient[place] *= np.float32(bound / norm)
            velocity[other] = np.float32(0.5) * velocity[other] + gradient
            unsent[other] += velocity[other]
            sent = largest(unsent[other], LAYERS, warmed(step, 6, 0.01))
            total += sent
            velocity[other][sent != 0] = 0
            unsent[other][sent != 0] = 0
        for results, _ in found:
            np.testing.assert_allclose(results[step], total, rtol=1e-5, atol=1e-7, err_msg=f"step {step}")
    for other, (_, state) in enumerate(found):
        np.testing.assert_allclose(state["dgc.velocity"].numpy(), velocity[other], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state["dgc.unsent"].numpy(), unsent[other], rtol=1e-4, atol=1e-6)


def test_densities_of_the_warm_up_are_the_papers() -> None:
    compressor = Dgc(warmup_steps=400)
    found = [compressor.density_at(step) for step in (0, 99, 100, 200, 300, 399, 400, 10**9)]
    assert found == [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001]
    assert Dgc(warmup_steps=400, density=0.1).density_at(150) == 0.1, "never less than after it"
    assert Dgc().density_at(0) == 0.001
    assert [Dgc(warmup_steps=2).density_at(step) for step in range(3)] == [0.25, 0.015625, 0.001]


def test_rounds_shrink_during_warm_up() -> None:
    bucket = Bucket((TensorSpec("w", (100_000,)),))
    compressor = Dgc(warmup_steps=8, indices="int32")
    found = [compressor.rounds(bucket, Moment(step, 0, 4))[0].sizes[0] for step in (0, 2, 4, 6, 8)]
    assert found == [8 * 25_000, 8 * 6_250, 8 * 1_563, 8 * 391, 8 * 100]


def test_nothing_is_left_behind() -> None:
    compressor = Dgc(density=0.5, momentum=0.9)
    bucket = Bucket((TensorSpec("w", (2,)),))
    state, transport = compressor.init(bucket), InProcessCluster(1).transport(0)
    sent = torch.zeros(2)
    for step in range(200):
        flat = torch.tensor([1.0, 1.0])
        exchange(compressor, flat, state, transport, step=step)
        sent += flat
    # Masked every other step, a velocity is 1, then 1.9: 2.9 in two steps for each, and nothing is left behind.
    torch.testing.assert_close(sent / 200, torch.tensor([1.45, 1.45]), rtol=0.02, atol=0.0)
    assert float(state.flat["dgc.unsent"].abs().max()) < 3


def test_a_residual_around_it_is_refused() -> None:
    with pytest.raises(IllegalCombination, match="dgc"):
        Strategy.parse("bsp / all_reduce / dgc + error_feedback")
    with pytest.raises(IllegalCombination, match="dgc"):
        Strategy.parse("bsp / all_reduce / dgc + momentum_correction")
