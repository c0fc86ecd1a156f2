"""Train replicas in threads, and compute what they should have done without laconic."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.strategy import as_strategy

Loss = Callable[[nn.Module, int, int], torch.Tensor | None]
"""(model, step, rank) -> the loss to differentiate, or None to skip the backward pass."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module, strategy: laconic.Strategy | str = "bsp") -> torch.optim.Optimizer:
    """SGD, with momentum unless the strategy keeps that itself; AdamW where its momentum is exchanged."""
    if as_strategy(strategy).synchronization.needs_adam:
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    momentum = 0.0 if keeps_momentum(strategy) else 0.9
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)


def keeps_momentum(strategy: laconic.Strategy | str) -> bool:
    """Whether the optimizer must have no momentum."""
    chosen = as_strategy(strategy)
    return chosen.compression.traits.accumulates or not chosen.synchronization.keeps_scale


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def data(step: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def mlp_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(data(step, rank, 4, 5)).square().mean()


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train(
    model: nn.Module,
    strategy: laconic.Strategy | str = "bsp",
    *,
    loss: Loss = mlp_loss,
    make_optimizer: MakeOptimizer = sgd,
    world_size: int = 2,
    steps: int = 4,
    find_unused_parameters: bool | None = None,
    events: laconic.EventList | None = None,
) -> list[dict[str, torch.Tensor]]:
    """The state of every replica after `steps` ordinary steps."""

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = copy.deepcopy(model)
        optimizer = make_optimizer(replica)
        with laconic.attach(
            replica,
            optimizer,
            strategy,
            transport=transport,
            find_unused_parameters=find_unused_parameters,
            events=events,
        ):
            for step in range(steps):
                value = loss(replica, step, transport.rank)
                if value is not None:
                    value.backward()
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(replica)

    return laconic.InProcessCluster(world_size, timeout_s=10).run(one_rank)


def loop(body, *, model=mlp, how="bsp", world_size=2, make_optimizer=sgd):
    """Run `body(model, optimizer, session, rank)` on every rank; the states at the end."""

    original = model()  # once: seeding and drawing in several threads would interleave

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = copy.deepcopy(original)
        optimizer = make_optimizer(replica)
        with laconic.attach(replica, optimizer, how, transport=transport) as session:
            body(replica, optimizer, session, transport.rank)
        return snapshot(replica)

    return laconic.InProcessCluster(world_size, timeout_s=10).run(one_rank)


def reference(
    model: nn.Module,
    *,
    loss: Loss = mlp_loss,
    make_optimizer: MakeOptimizer = sgd,
    world_size: int = 2,
    steps: int = 4,
) -> dict[str, torch.Tensor]:
    """The same training in one process: gradients of all ranks, scaled by 1/n and added up in rank order."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(steps):
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for rank in range(world_size):
            model.zero_grad()
            value = loss(model, step, rank)
            if value is not None:
                value.backward()
            for index, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    share = parameter.grad * (1.0 / world_size)
                    previous = sums[index]
                    sums[index] = share if previous is None else previous + share
        for parameter, mean in zip(parameters, sums, strict=True):
            parameter.grad = mean
        optimizer.step()
    return snapshot(model)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"these differ: {different}"
