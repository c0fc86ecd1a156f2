"""A GradScaler in the loop: what is remembered follows its scale, and a skipped step counts where ranks are apart."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CheckpointError, LaconicWarning
from tests.runtime.replicas import assert_equal, data, snapshot

TOPK = "bsp / all_reduce / topk(density=0.1) + error_feedback / fusion"
GRADIENT = torch.linspace(0.01, 1, 100)
STEPS = 10


def scaler(**settings: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1, **settings)  # type: ignore[arg-type]


def zeros() -> nn.Module:
    model = nn.Linear(100, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, scale: torch.amp.GradScaler, count: int) -> None:
    for _ in range(count):
        scale.scale((model.weight.view(-1) * GRADIENT).sum()).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()


def owed(state: dict, rank: int) -> torch.Tensor:
    (fields,) = state["ranks"][str(rank)].values()
    return fields["error_feedback.residual"].view(-1)


@pytest.mark.parametrize("known", [False, True], ids=["found", "given"])
def test_what_was_applied_and_what_is_owed_are_the_sum_of_gradients(known: bool) -> None:
    """The scale doubles in every step; residuals in its unit would be worth half as much each time."""

    def one_rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model, scale = zeros(), scaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given = {"grad_scaler": scale} if known else {}
        with laconic.attach(model, optimizer, TOPK, transport=transport, **given) as session:  # type: ignore[arg-type]
            steps(model, optimizer, scale, STEPS)
            return -model.weight.detach().view(-1), owed(session.state_dict(), transport.rank)

    results = laconic.InProcessCluster(2).run(one_rank)
    total = sum(residual for _, residual in results)
    torch.testing.assert_close(results[0][0] + total, STEPS * GRADIENT, rtol=1e-5, atol=1e-5)
    assert float(total.abs().max()) > 0.5, "something is owed, or this would be no test"


def test_it_goes_on_from_a_checkpoint() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model, scale = zeros(), scaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with laconic.attach(model, optimizer, TOPK, transport=transport) as session:
            steps(model, optimizer, scale, 4)
            saved = copy.deepcopy([session.state_dict(), model.state_dict(), scale.state_dict()])
            steps(model, optimizer, scale, 5)
            expected = snapshot(model)
        again, scale = zeros(), scaler()
        optimizer = torch.optim.SGD(again.parameters(), lr=1.0)
        again.load_state_dict(saved[1])
        scale.load_state_dict(saved[2])
        session = laconic.attach(again, optimizer, TOPK, transport=transport)
        with pytest.raises(CheckpointError, match=r"attach\(\.\.\., grad_scaler=scaler\)"):
            session.load_state_dict(saved[0])
        session.detach()
        with laconic.attach(again, optimizer, TOPK, transport=transport, grad_scaler=scale) as session:
            session.load_state_dict(saved[0])
            steps(again, optimizer, scale, 5)
        assert_equal(snapshot(again), expected)

    laconic.InProcessCluster(2, timeout_s=10).run(one_rank)


def test_a_method_that_goes_by_absolute_size_is_warned_of() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model, scale = zeros(), scaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = "bsp / all_reduce / threshold(tau=0.1) + error_feedback"
        with (
            pytest.warns(LaconicWarning, match="treats gradients by their absolute size"),
            laconic.attach(model, optimizer, strategy, transport=transport),
        ):
            steps(model, optimizer, scale, 2)

    laconic.InProcessCluster(1).run(one_rank)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


class CountsSteps(torch.optim.SGD):
    """Has a counter of its own, which a skipped step must not move."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.calls = 0

    def step(self, closure=None):
        self.calls += any(p.grad is not None for group in self.param_groups for p in group["params"])
        return super().step(closure)


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "counts": lambda ps: CountsSteps(ps, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco(period=2)",
        "local_sgd(period=3)",
        "fedprox(period=3)",
        "scaffold(period=3)",
        "bsp / gossip",
        "asp / gossip",
    ],
)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("unscale", [False, True], ids=["scaler unscales", "user unscales"])
def test_an_overflow_on_one_rank_counts_as_a_step_on_all(strategy: str, optimizer_name: str, unscale: bool) -> None:
    original = mlp()
    overflow_in = 4  # which ends no round of three steps

    def one_rank(transport: InProcessTransport) -> tuple[int, dict[str, torch.Tensor]]:
        model = copy.deepcopy(original)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(8):
                result = model(data(step, transport.rank, 4, 5)).square().mean()
                if step == overflow_in and transport.rank == 1:
                    result = result * float("inf")
                before = snapshot(model)
                scale.scale(result).backward()
                if unscale:
                    scale.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scale.step(optimizer)
                scale.update()
                optimizer.zero_grad()
                alone = "period=3" in strategy
                if step == overflow_in and transport.rank == 1 and alone:
                    assert_equal(snapshot(model), before)
            count = session.step
            session.average()
        if isinstance(optimizer, CountsSteps):
            assert optimizer.calls == 8 - (transport.rank == 1)
        return count, snapshot(model)

    (steps_here, here), (steps_there, there) = laconic.InProcessCluster(2, timeout_s=10).run(one_rank)
    assert steps_here == steps_there == 8
    assert_equal(here, there)
    assert all(bool(value.isfinite().all()) for value in here.values())


def test_scaled_and_unscaled_training_are_the_same_under_local_updates() -> None:
    original = mlp()

    def trained(scaled: bool) -> dict[str, torch.Tensor]:
        def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
            model = copy.deepcopy(original)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            scale = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2, enabled=scaled)
            with laconic.attach(model, optimizer, "local_sgd(period=2)", transport=transport):
                for step in range(6):
                    scale.scale(model(data(step, transport.rank, 4, 5)).square().mean()).backward()
                    scale.step(optimizer)
                    scale.update()
                    optimizer.zero_grad()
            return snapshot(model)

        return laconic.InProcessCluster(2).run(one_rank)[0]

    assert_equal(trained(True), trained(False))
