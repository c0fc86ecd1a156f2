"""A small problem whose gradients can be written by hand, and what laconic makes of it step by step.

Worker i in step t has matrices M_p, one per parameter p, and a target y of its own:

    loss = |r|^2 / 2,   r = sum_p M_p p - y,   gradient of p = M_p^T r
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessCluster, InProcessTransport

NAMES = ("a", "b", "c", "d")
NUMEL = 12
_TARGETS = 6

Values = dict[str, torch.Tensor]
"""One value per parameter."""
Replicas = list[Values]
"""Those of every worker."""


class LeastSquares(nn.Module):
    """The parameters, and the loss of one worker in one step."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in start().items():
            self.register_parameter(name, nn.Parameter(value.float()))

    def forward(self, step: int, rank: int) -> torch.Tensor:
        matrices, target = _data(step, rank)
        found = sum(matrices[name].float() @ parameter for name, parameter in self.named_parameters())
        return (found - target.float()).square().sum() / 2


def start() -> Values:
    """The parameters before the first step."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(NUMEL, generator=generator, dtype=torch.float64) for name in NAMES}


def gradient(x: Values, step: int, rank: int) -> Values:
    """The gradient by hand."""
    matrices, target = _data(step, rank)
    rest = sum(matrices[name] @ x[name] for name in NAMES) - target
    return {name: matrices[name].T @ rest for name in NAMES}


def _data(step: int, rank: int) -> tuple[Values, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    matrices = {name: torch.randn(_TARGETS, NUMEL, generator=generator, dtype=torch.float64) / 3 for name in NAMES}
    return matrices, torch.randn(_TARGETS, generator=generator, dtype=torch.float64)


def each(number: int) -> Replicas:
    """That many workers, all at the start."""
    return [copy.deepcopy(start()) for _ in range(number)]


def mean(replicas: Replicas) -> Values:
    return {name: sum(replica[name] for replica in replicas) / len(replicas) for name in NAMES}


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """`values` with all but the `count` largest magnitudes set to zero."""
    kept = torch.zeros_like(values)
    for index in sorted(range(len(values)), key=lambda place: -abs(values[place].item()))[:count]:
        kept[index] = values[index]
    return kept


def trained(
    strategy: str,
    *,
    world_size: int,
    steps: int = 20,
    rate: Callable[[int], float] = lambda step: 0.05,
    momentum: float = 0.0,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    after_step: Callable[[laconic.Session], object] | None = None,
) -> list[Replicas]:
    """The parameters of every replica after every step of SGD, or of what `make` gives, under `strategy`."""
    models = [LeastSquares() for _ in range(world_size)]

    def one_rank(transport: InProcessTransport) -> Replicas:
        model, found = models[transport.rank], []
        parameters = list(model.parameters())
        optimizer = make(parameters) if make else torch.optim.SGD(parameters, lr=rate(0), momentum=momentum)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = rate(step)
                loss = model(step, transport.rank)
                loss.backward()
                session.report_loss(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append({name: value.detach().clone() for name, value in model.named_parameters()})
                if after_step is not None:
                    after_step(session)
        return found

    return [list(replicas) for replicas in zip(*InProcessCluster(world_size).run(one_rank), strict=True)]


def assert_close(found: list[Replicas], expected: list[Replicas]) -> None:
    """The same numbers to float32 tolerance, after every step and on every worker."""
    assert len(found) == len(expected)
    for step, (replicas, right) in enumerate(zip(found, expected, strict=True)):
        for rank, (values, wanted) in enumerate(zip(replicas, right, strict=True)):
            for name in NAMES:
                torch.testing.assert_close(
                    values[name].double(),
                    wanted[name],
                    rtol=1e-4,
                    atol=2e-5,
                    msg=lambda text, at=f"step {step}, rank {rank}, {name}": f"{at}: {text}",
                )
