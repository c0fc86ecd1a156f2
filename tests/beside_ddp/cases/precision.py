"""Several dtypes in one model, autocast, GradScaler, infinities."""

from __future__ import annotations

import torch
from torch import nn

from tests.beside_ddp.cases.contract import Turn, case
from tests.beside_ddp.cases.models import mlp


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)
        self.b = nn.Linear(4, 4).double()
        self.c = nn.Linear(4, 3).bfloat16()
        self.d = nn.Parameter(torch.randn(3).half())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(inputs).double()).bfloat16()).float() * self.d.float()


@case(model=Mixed, optimizer=plain)
def four_floating_point_dtypes(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=Mixed, optimizer=plain, bucket_cap_mb=1e-5)
def four_floating_point_dtypes_many_buckets(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.scale = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale((inputs.to(torch.complex64) @ self.phase).abs())


@case(model=Complex, optimizer=plain)
def complex_parameters(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=lambda: mlp().bfloat16(), optimizer=plain)
def everything_in_bfloat16(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5).bfloat16()).float().square().mean())


@case(model=lambda: mlp().double())
def everything_in_float64(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5).double()).square().mean())


@case(model=mlp)
def autocast(turn: Turn) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = turn.call(turn.data(4, 5)).float().square().mean()
    turn.learn(loss)


@case(model=mlp, steps=8)
def grad_scaler_with_an_overflow_on_one_rank(turn: Turn) -> None:
    scaler = turn.memory.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=2))
    turn.optimizer.zero_grad()
    before = scaler.get_scale()
    loss = turn.call(turn.data(4, 5)).square().mean() * (1e30 if turn.step == 3 and turn.rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(turn.optimizer)
    nn.utils.clip_grad_norm_(turn.model.parameters(), 1.0)
    scaler.step(turn.optimizer)
    scaler.update()
    assert turn.step != 3 or scaler.get_scale() < before, "an overflow on one rank must be seen by all"


@case(model=mlp, steps=3)
def nan_on_one_rank_reaches_all(turn: Turn) -> None:
    bad = float("nan") if turn.step == 1 and turn.rank == 1 else 1.0
    turn.learn(turn.call(turn.data(4, 5)).square().mean() * bad)


@case(model=mlp)
def gradients_that_differ_by_many_orders_of_magnitude(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean() * 10.0 ** (6 * turn.rank - 6))
