"""NoLoCo against the published rule, in which changes and anchors are averaged one by one."""

from __future__ import annotations

import pytest
import torch

from laconic import TensorSpec
from laconic.architecture.graphs.topologies import TOPOLOGIES
from laconic.strategy import Strategy
from tests.least_squares import NAMES, NUMEL, Replicas, assert_close, each, gradient, trained

pytestmark = pytest.mark.timeout(60)
STEPS, RATE, PERIOD = 24, 0.05, 3


def met(topology: str, workers: int, round: int) -> list[list[int]]:
    """For each worker those whose mean it gets, itself among them; that they are drawn well is tested elsewhere."""
    around = [TOPOLOGIES[topology].neighbourhood(rank, workers, round, 0) for rank in range(workers)]
    return [sorted({rank, *part.receives}) for rank, part in enumerate(around)]


def published(workers: int, topology: str, alpha: float, beta: float, gamma: float) -> list[Replicas]:
    """delta <- alpha delta + beta mean(theta_j - phi_j) - gamma (phi - mean(phi_j)),   phi <- phi + delta."""
    theta, phi, expected = each(workers), each(workers), []
    delta = [dict.fromkeys(NAMES, torch.zeros(NUMEL, dtype=torch.float64)) for _ in range(workers)]
    for step in range(STEPS):
        slopes = [gradient(values, step, rank) for rank, values in enumerate(theta)]
        theta = [{name: x[name] - RATE * slope[name] for name in NAMES} for x, slope in zip(theta, slopes, strict=True)]
        if (step + 1) % PERIOD == 0:
            groups = met(topology, workers, (step + 1) // PERIOD - 1)
            moves: Replicas = []
            for rank, group in enumerate(groups):
                moves.append({})
                for name in NAMES:
                    gain = sum(theta[j][name] - phi[j][name] for j in group) / len(group)
                    apart = phi[rank][name] - sum(phi[j][name] for j in group) / len(group)
                    moves[-1][name] = alpha * delta[rank][name] + beta * gain - gamma * apart
            delta = moves
            phi = [{name: phi[rank][name] + delta[rank][name] for name in NAMES} for rank in range(workers)]
            theta = [dict(values) for values in phi]
        expected.append(theta)
    return expected


@pytest.mark.parametrize(
    ("workers", "topology", "alpha", "beta", "gamma"),
    [
        (1, "random_pairs", 0.5, 0.7, 1.0),
        (4, "random_pairs", 0.5, 0.7, 1.0),
        (5, "random_pairs", 0.3, 0.9, 0.6),
        (4, "ring", 0.0, 0.7, 1.5),
    ],
)
def test_the_published_outer_step(workers: int, topology: str, alpha: float, beta: float, gamma: float) -> None:
    text = f"noloco(period={PERIOD}, lr={beta}, momentum={alpha}, gamma={gamma}) / gossip({topology})"
    assert_close(trained(text, world_size=workers, steps=STEPS), published(workers, topology, alpha, beta, gamma))


def test_a_round_sends_the_model_once_however_many_workers_there_are() -> None:
    specs = [TensorSpec("w", (1000, 10))]
    sent = [Strategy.parse("noloco(period=10)").wire_bytes_per_step(specs, workers) for workers in (2, 8, 64)]
    assert sent == [4000] * 3
