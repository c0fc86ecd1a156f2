"""Training by one worker with servers, and without, for tests that compare the two."""

from __future__ import annotations

import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from tests.runtime.replicas import mlp, mlp_loss, snapshot

FULL = "asp(learning_rate=full) / parameter_server"


class Nothing:
    """Where laconic is not attached."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, *, first: int = 0, rank: int = 0) -> None:
    for step in range(first, first + count):
        mlp_loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(train, strategy: str = FULL) -> dict[str, torch.Tensor]:
    """The parameters after `train(model, attach)` by one worker; `attach` puts the strategy to work."""

    def one(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = mlp()
        train(model, lambda optimizer: laconic.attach(model, optimizer, strategy, transport=transport))
        return snapshot(model)

    return laconic.InProcessCluster(1, timeout_s=10).run(one)[0]


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-6, atol=1e-6)
