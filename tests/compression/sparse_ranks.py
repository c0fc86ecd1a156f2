"""What real processes do in the tests of sparsifiers: called by run_processes on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import laconic
from tests.processes import gloo_group
from tests.runtime.replicas import data, snapshot


def deep() -> nn.Module:
    """Many parameters, so that many buckets are on their way at the same time."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(24, 24), nn.Tanh())))


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return (model(data(step, rank, 16, 24)) - 0.3).square().mean()


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def trains(strategies: list[str], steps: int) -> list[dict[str, object]]:
    """One training after the other."""
    results: list[dict[str, object]] = []
    with gloo_group():
        for strategy in strategies:
            model = deep()
            optimizer = plain_sgd(model)
            with laconic.attach(model, optimizer, strategy, timeout_s=20) as session:
                predicted, before = 0, 0
                for step in range(steps):
                    if step == 1:  # from now on the order of gradients is known, and the buckets with it
                        before = session.traffic.sent_bytes("payload")
                    predicted += session.predicted_bytes_per_step() if step else 0
                    loss(model, step, dist.get_rank()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                results.append(
                    {
                        "state": snapshot(model),
                        "num_buckets": len(session.plan.buckets),
                        "counted": session.traffic.sent_bytes("payload") - before,
                        "predicted": predicted,
                        "exact": session.strategy.compression.traits.exact_bytes,
                    }
                )
    return results
