"""Optimizers that differ between ranks when they are attached: reported, or made equal."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import AttachError
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, sgd, snapshot


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        mlp_loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def attached(prepare, strategy: str = "bsp", *, make=adamw, world_size: int = 2, **options: bool) -> list:
    """Prepare an optimizer on each rank, attach, and make two steps."""

    def one_rank(transport: InProcessTransport) -> tuple[dict, dict]:
        model = mlp()
        optimizer = make(model)
        prepare(model, optimizer, transport.rank)
        with laconic.attach(model, optimizer, strategy, transport=transport, **options):
            train(model, optimizer, transport.rank, 2)
        state = {
            f"{index}.{key}": torch.as_tensor(value)
            for index, fields in optimizer.state_dict()["state"].items()
            for key, value in fields.items()
            if value is not None
        }
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        return {**snapshot(model), **state}, settings

    return laconic.InProcessCluster(world_size, timeout_s=10).run(one_rank)


def apart(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    train(model, optimizer, rank, 2)


def only_rank_1(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    train(model, optimizer, rank, 2 * rank)


def only_rank_0(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    train(model, optimizer, rank, 2 - 2 * rank)


def another_rate(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 + 1e-9 * rank


@pytest.mark.parametrize(
    ("prepare", "make", "complaint"),
    [
        (apart, adamw, "exp_avg of parameter 0.weight"),
        (apart, sgd, "momentum_buffer of parameter 0.weight"),
        (only_rank_1, adamw, r"exp_avg of parameter 0.weight is missing on rank 0"),
        (only_rank_0, adamw, r"and missing on rank 1"),
        (another_rate, adamw, r"lr in parameter group 0 is 0.01 on rank 0 and 0.010000001 on rank 1"),
    ],
)
def test_what_differs_is_named_or_made_equal(prepare, make, complaint: str) -> None:
    with pytest.raises(AttachError, match=complaint) as raised:
        attached(prepare, make=make)
    assert "sync_optimizer=True" in str(raised.value)
    (first, settings), *others = attached(prepare, make=make, world_size=3, sync_optimizer=True)
    for state, other_settings in others:
        assert_equal(state, first)
        assert other_settings == settings


@pytest.mark.parametrize("strategy", ["diloco(period=2)", "bsp / gossip / none / fusion"])
def test_replicas_that_may_differ_may_have_optimizers_that_differ(strategy: str) -> None:
    attached(apart, strategy)


def test_rates_that_are_tensors_are_compared_and_made_equal() -> None:
    def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01 * (1 + rank))

    with pytest.raises(AttachError, match="lr in parameter group 0"):
        attached(prepare)
    (first, _), (second, settings) = attached(prepare, sync_optimizer=True)
    assert_equal(first, second)
    assert float(settings["lr"]) == pytest.approx(0.01)


def test_functions_among_the_settings_are_left_alone() -> None:
    def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        optimizer.param_groups[0]["callback"] = lambda: rank

    attached(prepare)
    for rank, (_, settings) in enumerate(attached(prepare, sync_optimizer=True)):
        assert settings["callback"]() == rank


def test_values_in_another_order_break_the_promise_of_init_sync() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        if transport.rank:
            with torch.no_grad():
                model[0].weight.copy_(model[0].weight.flip(0))
        laconic.attach(model, sgd(model), "bsp", transport=transport, init_sync=False).detach()

    with pytest.raises(AttachError, match=r'"0.weight" is not the same on rank 0 and rank 1'):
        laconic.InProcessCluster(2, timeout_s=10).run(one_rank)


class Nested(torch.optim.Optimizer):
    """Keeps lists and dictionaries of tensors, as optimizers with preconditioners do, and a state of no parameter."""

    def __init__(self, parameters, extra: object = None) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.extra = extra

    @torch.no_grad()
    def step(self, closure=None) -> None:
        shared = self.state.setdefault("shared", {"count": 0, "sizes": [torch.zeros(2)]})
        shared["count"] += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["means"] = [torch.zeros_like(parameter), (torch.zeros(3), 0)]
                state["by_name"] = {"square": torch.zeros_like(parameter)}
            if self.extra is not None:
                state["extra"] = [self.extra]
            mean, (kept, count) = state["means"]
            mean.mul_(0.9).add_(parameter.grad)
            state["means"][1] = (kept + parameter.grad.mean(), count + 1)
            state["by_name"]["square"].mul_(0.9).addcmul_(parameter.grad, parameter.grad)
            shared["sizes"][0] += parameter.grad.norm()
            parameter.add_(mean / (state["by_name"]["square"].sqrt() + 1e-3 + shared["sizes"][0][0]), alpha=-0.01)


def nested(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Nested(model.parameters())


def test_nested_state_is_compared_and_made_equal() -> None:
    with pytest.raises(AttachError, match=r"by_name\['square'\] of parameter 0.weight is \(7, 5\)"):
        attached(apart, make=nested)

    def one_rank(transport: InProcessTransport) -> tuple[dict, dict]:
        model = mlp()
        optimizer = Nested(model.parameters())
        train(model, optimizer, transport.rank, 1 + transport.rank)
        with laconic.attach(model, optimizer, "bsp", transport=transport, sync_optimizer=True):
            train(model, optimizer, transport.rank, 2)
        first = optimizer.state[next(iter(model.parameters()))]
        shared = optimizer.state["shared"]
        kept = {"count": torch.tensor(shared["count"]), "sizes": shared["sizes"][0]}
        kept |= {"mean": first["means"][0], "kept": first["means"][1][0], "square": first["by_name"]["square"]}
        return {**snapshot(model), **kept}, {"kinds": (type(first["means"]), type(first["means"][1]))}

    (first, kinds), *others = laconic.InProcessCluster(3, timeout_s=10).run(one_rank)
    assert first["count"] == 3  # rank 0 had made one step before, and the others more
    assert kinds == {"kinds": (list, tuple)}
    for state, _ in others:
        assert_equal(state, first)


def test_state_that_cannot_be_sent_is_named_on_every_rank() -> None:
    def one_rank(transport: InProcessTransport) -> str:
        model = mlp()
        optimizer = Nested(model.parameters(), extra=object() if transport.rank == 0 else None)
        train(model, optimizer, 0, 1)
        with pytest.raises(AttachError) as raised:
            laconic.attach(model, optimizer, "bsp", transport=transport, sync_optimizer=True)
        return str(raised.value)

    for said in laconic.InProcessCluster(2, timeout_s=10).run(one_rank):
        assert said.startswith('Nested keeps a list in the state of parameter 0.weight, as "extra"')
