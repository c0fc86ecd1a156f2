"""MuLoCo: Muon inside, DiLoCo outside, 4 bits with a residual between; against a loop without laconic."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.strategy import PRESETS
from tests.runtime.replicas import assert_equal, data, mlp, snapshot

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
STEPS, PERIOD, WORKERS = 12, 4, 3
Tensors = dict[str, torch.Tensor]


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, as Muon is used."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def step_of(model: nn.Module, made: list[torch.optim.Optimizer], step: int, rank: int) -> None:
    (model(data(step, rank, 4, 5)) - 1).square().mean().backward()
    for optimizer in made:
        optimizer.step()
    for optimizer in made:
        optimizer.zero_grad()


def four_bits(values: torch.Tensor) -> torch.Tensor:
    unit = values.abs().max() / 7
    return unit * (values / unit).round()


def by_hand() -> Tensors:
    models = [mlp() for _ in range(WORKERS)]
    made = [optimizers(model) for model in models]
    old = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    left = [{name: torch.zeros_like(p) for name, p in old.items()} for _ in models]
    momentum = {name: torch.zeros_like(p) for name, p in old.items()}
    for step in range(STEPS):
        for rank, model in enumerate(models):
            step_of(model, made[rank], step, rank)
        if (step + 1) % PERIOD:
            continue
        for name in [name for name, _ in models[0].named_parameters()]:
            sent = []
            for rank, model in enumerate(models):
                due = (old[name] - model.get_parameter(name).detach()) + left[rank][name]
                sent.append(four_bits(due))
                left[rank][name] = due - sent[-1]
            change = torch.stack(sent).mean(0)
            momentum[name] = 0.9 * momentum[name] + change
            old[name] = old[name] - 0.7 * (change + 0.9 * momentum[name])
            for model in models:
                model.get_parameter(name).data.copy_(old[name])
    return old


def test_muloco_is_diloco_in_4_bits_around_muon() -> None:
    text = PRESETS["muloco"][0].replace("diloco", f"diloco(period={PERIOD})").replace("int4", "int4(route=gather)")
    start = mlp()

    def one_rank(transport: InProcessTransport) -> Tensors:
        model = copy.deepcopy(start)
        made = optimizers(model)
        with laconic.attach(model, made, text, transport=transport):
            for step in range(STEPS):
                step_of(model, made, step, transport.rank)
        return snapshot(model)

    found = InProcessCluster(WORKERS).run(one_rank)
    for name, value in by_hand().items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-3, atol=1e-4)
    for replica in found:
        assert_equal(replica, found[0])
