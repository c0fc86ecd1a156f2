"""Several optimizers over one model, and wrappers that pass for an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim import Optimizer

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import AttachError, CommunicationError
from tests.runtime.replicas import assert_equal, data, snapshot

STEPS = 9


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))


def muon_and_adamw(replica: nn.Module) -> list[Optimizer]:
    matrices = [p for p in replica.parameters() if p.dim() == 2]
    vectors = [p for p in replica.parameters() if p.dim() < 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]


def sgd_twice(replica: nn.Module) -> list[Optimizer]:
    halves = [list(replica[0].parameters()), [*replica[1].parameters(), *replica[3].parameters()]]
    return [torch.optim.SGD(half, lr=0.1, momentum=0.9) for half in halves]


def loss(replica: nn.Module, step: int, rank: int) -> torch.Tensor:
    return replica(data(step, rank, 4, 6)).square().mean()


def trained(strategy: str, make: Callable[[nn.Module], Sequence[Optimizer]], world_size: int = 2) -> list[dict]:
    original = model()

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = copy.deepcopy(original)
        optimizers = list(make(replica))
        with laconic.attach(replica, optimizers, strategy, transport=transport) as session:
            for step in range(STEPS):
                loss(replica, step, transport.rank).backward()
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            assert session.step == STEPS
            if not session.strategy.exchanges_gradients():
                session.average()
        return snapshot(replica)

    return laconic.InProcessCluster(world_size, timeout_s=10).run(one_rank)


def alone(make: Callable[[nn.Module], Sequence[Optimizer]], world_size: int = 2) -> dict[str, torch.Tensor]:
    """Without laconic: the mean gradient of all ranks, applied by the same optimizers."""
    replica = model()
    optimizers = make(replica)
    for step in range(STEPS):
        parts = []
        for rank in range(world_size):
            parts.append(torch.autograd.grad(loss(replica, step, rank), list(replica.parameters())))
        for parameter, *gradients in zip(replica.parameters(), *parts, strict=True):
            parameter.grad = sum(gradient / world_size for gradient in gradients)
        for optimizer in optimizers:
            optimizer.step()
    return snapshot(replica)


@pytest.mark.parametrize("make", [muon_and_adamw, sgd_twice])
@pytest.mark.parametrize("schedule", ["fusion", "wfbp", "priority(partition_bytes=1KiB)", "dear(bytes=1KiB)"])
def test_two_optimizers_over_one_model(schedule: str, make: Callable[[nn.Module], Sequence[Optimizer]]) -> None:
    first, second = trained(f"bsp / all_reduce / none / {schedule}", make)
    assert_equal(first, second)
    assert_equal(first, alone(make))


@pytest.mark.parametrize("strategy", ["diloco(period=2)", "local_sgd(period=3)", "bsp / gossip", "slowmo(period=2)"])
def test_rounds_wait_for_all_optimizers(strategy: str) -> None:
    """A round that begins between two optimizers' steps would leave replicas apart."""
    first, second = trained(strategy, muon_and_adamw)
    assert_equal(first, second)


def test_local_sgd_with_two_optimizers_is_local_sgd() -> None:
    def both(replica: nn.Module) -> list[Optimizer]:
        return [torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)]

    for one, other in zip(trained("local_sgd(period=3)", sgd_twice), trained("local_sgd(period=3)", both), strict=True):
        assert_equal(one, other)


def test_an_optimizer_called_twice_in_a_step_is_refused_by_name() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        replica = model()
        muon, adamw = muon_and_adamw(replica)
        with laconic.attach(replica, [muon, adamw], "bsp", transport=transport):
            loss(replica, 0, transport.rank).backward()
            muon.step()
            muon.step()

    with pytest.raises(CommunicationError, match="Muon is called twice in step 0, and AdamW not yet"):
        laconic.InProcessCluster(2).run(one_rank)


def refused(replica: nn.Module, optimizer: object, strategy: str) -> str:
    with pytest.raises(AttachError) as caught:
        laconic.attach(replica, optimizer, strategy, transport=laconic.InProcessCluster(1).transport(0))  # type: ignore[arg-type]
    return str(caught.value)


def test_one_of_two_optimizers_is_refused_where_it_would_be_wrong() -> None:
    replica = model()
    muon, adamw = muon_and_adamw(replica)
    assert "must know every optimizer: attach(model, [a, b], ...)" in refused(replica, muon, "diloco(period=2)")
    assert "must know every optimizer" in refused(replica, adamw, "bsp / gossip")
    # Gradients are averaged for whoever applies them.
    transport = laconic.InProcessCluster(1).transport(0)
    laconic.attach(replica, muon, "bsp", transport=transport).detach()


def test_what_is_no_set_of_optimizers() -> None:
    replica = model()
    muon, adamw = muon_and_adamw(replica)
    assert "got 0" in refused(replica, [], "bsp")
    assert "several different ones, got 2" in refused(replica, [muon, muon], "bsp")
    assert "in two optimizers" in refused(replica, [adamw, torch.optim.SGD(replica.parameters(), lr=1.0)], "bsp")
    assert "got str" in refused(replica, [muon, "adamw"], "bsp")


class Wrapper(Optimizer):
    """As accelerate's: an Optimizer by class, with none of its parts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure=None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Hollow(Optimizer):
    """An Optimizer by class that wraps nothing one could find."""

    def __init__(self) -> None:
        pass


def test_a_wrapper_is_opened_or_refused_by_name() -> None:
    replica = model()
    inner = torch.optim.SGD(replica.parameters(), lr=0.1)
    wrapper = Wrapper(inner)
    session = laconic.attach(replica, wrapper, "bsp", transport=laconic.InProcessCluster(1).transport(0))
    loss(replica, 0, 0).backward()
    wrapper.step()
    assert session.step == 1
    session.detach()
    assert "Hollow is a torch.optim.Optimizer without its hooks" in refused(replica, Hollow(), "bsp")


class CallsItsParent(torch.optim.SGD):
    """torch wraps the step of both classes, so hooks run twice in every step."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    "strategy", ["local_sgd(period=3)", "bsp / all_reduce / none / priority(partition_bytes=1KiB)", "bsp / gossip"]
)
def test_a_subclass_that_calls_its_parents_step_makes_one_step(strategy: str) -> None:
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)  # torch wraps a class when it is first used

    def of(kind: type[torch.optim.SGD]) -> Callable[[nn.Module], Sequence[Optimizer]]:
        return lambda replica: [kind(replica.parameters(), lr=0.1, momentum=0.9)]

    for one, other in zip(trained(strategy, of(CallsItsParent)), trained(strategy, of(torch.optim.SGD)), strict=True):
        assert_equal(one, other)


def test_a_step_that_raises_leaves_the_next_one_right() -> None:
    class Raises(CallsItsParent):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise ValueError("not yet")
            return super().step(closure)

    replica = model()
    optimizer = Raises(replica.parameters(), lr=0.1)
    with laconic.attach(replica, optimizer, "bsp", transport=laconic.InProcessCluster(1).transport(0)) as session:
        loss(replica, 0, 0).backward()
        with pytest.raises(ValueError, match="not yet"):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
        assert session.step == 1
        optimizer.step()
        assert session.step == 2


@pytest.mark.parametrize(
    "strategy", ["bsp / all_reduce / none", "bsp / all_reduce / none / dear", "local_sgd(period=2)", "demo"]
)
def test_state_that_a_checkpoint_makes_for_an_optimizer_is_no_step(strategy: str) -> None:
    original = model()

    def one_rank(transport: InProcessTransport) -> list[dict[str, torch.Tensor]]:
        found = []
        for asked in (False, True):
            replica = copy.deepcopy(original)
            optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
            with laconic.attach(replica, optimizer, strategy, transport=transport) as session:
                if asked:
                    # get_state_dict() and set_state_dict() begin with it.
                    _init_optim_state(optimizer)
                    assert session.step == 0
                for step in range(STEPS):
                    loss(replica, step, transport.rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert session.step == STEPS
            found.append(snapshot(replica))
        return found

    for without, after in laconic.InProcessCluster(2, timeout_s=10).run(one_rank):
        assert_equal(without, after)
