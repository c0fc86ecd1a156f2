"""Schedules that plan by time or hold updates back, on real processes whose ranks do not do the same.

Right, or an error that says why: never a hang, and never the gradient of one layer in the place of another's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import CommunicationError
from tests.processes import RankResult, gloo_group, run_processes
from tests.runtime.replicas import assert_equal, data, sgd, snapshot

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(90)]

SCHEDULES = {
    "mg_wfbp": "mg_wfbp",
    "priority": "priority(partition_bytes=1024, credit_bytes=2048)",
    "dear": "dear(bytes=512)",
}
STEPS = 12
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


class Branches(nn.Module):
    """Layers of different sizes side by side, used in any order, some twice, some not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Linear(8, width) for width in (5, 20, 40, 60))

    def forward(self, inputs: torch.Tensor, used: list[int]) -> torch.Tensor:
        hidden = self.trunk(inputs).tanh()
        return sum((self.branches[number](hidden).square().mean() for number in used), hidden.square().mean())


def in_any_order(step: int, rank: int) -> list[int]:
    """All branches, in an order of each rank's own."""
    return torch.randperm(4, generator=torch.Generator().manual_seed(10 * step + rank)).tolist()


def always_backwards_on_one_rank(step: int, rank: int) -> list[int]:
    return [0, 1, 2, 3] if rank == 0 else [3, 2, 1, 0]


def skipped_on_one_rank(step: int, rank: int) -> list[int]:
    """Every branch is left out by one rank, by the other and by both in turn."""
    return [number for number in range(4) if (step + number) % 4 != rank and (step + number) % 5]


def twice_on_one_rank(step: int, rank: int) -> list[int]:
    return [0, 1, 2, 3, 1, 2] if (step + rank) % 2 else [2, 3, 0, 1]


Use = Callable[[int, int], list[int]]
USES: dict[str, Use] = {
    use.__name__: use for use in (in_any_order, always_backwards_on_one_rank, skipped_on_one_rank, twice_on_one_rank)
}


def original() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


def trained_unlike() -> dict[str, dict[str, torch.Tensor]]:
    """What each rank does: every use of the branches with torch DDP, and with every schedule."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    with gloo_group():
        for name, use in USES.items():
            model = original()
            _train(DistributedDataParallel(model, find_unused_parameters=True), sgd(model), use)
            found[f"{name} ddp"] = snapshot(model)
            for schedule, text in SCHEDULES.items():
                model = original()
                optimizer = sgd(model)
                with laconic.attach(model, optimizer, f"bsp / all_reduce / none / {text}", timeout_s=20):
                    _train(model, optimizer, use)
                found[f"{name} {schedule}"] = snapshot(model)
    return found


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, use: Use) -> None:
    rank = dist.get_rank()
    for step in range(STEPS):
        model(data(step, rank, 4, 6), use(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def unlike() -> list[RankResult]:
    return run_processes("tests.runtime.test_schedules_robust:trained_unlike", world_size=2, timeout_s=80)


@every_schedule
@pytest.mark.parametrize("use", USES)
def test_ranks_that_use_layers_differently_train_as_with_ddp(schedule: str, use: str, unlike: list[RankResult]) -> None:
    for result in unlike:
        assert_equal(result.value[f"{use} {schedule}"], result.value[f"{use} ddp"])
        assert_equal(result.value[f"{use} {schedule}"], unlike[0].value[f"{use} {schedule}"])


class Boom(torch.autograd.Function):
    """Raises where the gradient should pass."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("the gradient broke")


def interrupted() -> dict[str, dict[str, object]]:
    """What each rank does: train, be interrupted on rank 1 in the middle of backward, and attach again.

    Rank 1 lets the error pass, or catches it and goes on as if nothing had happened.
    """
    found: dict[str, dict[str, object]] = {}
    with gloo_group():
        for schedule, text in SCHEDULES.items():
            for caught in (False, True):
                model = original()
                optimizer = sgd(model)
                began_s = time.monotonic()
                try:
                    with laconic.attach(model, optimizer, f"bsp / all_reduce / none / {text}", timeout_s=10):
                        _train(model, optimizer, in_any_order)
                        began_s = time.monotonic()
                        _one_step_with_boom(model, optimizer, caught=caught)
                        _train(model, optimizer, in_any_order)
                    error = "none"
                except (CommunicationError, ValueError) as exc:
                    error = f"{type(exc).__name__}: {exc}"
                took_s = time.monotonic() - began_s
                again = original()
                dist.barrier()
                _again(again, text)
                found[f"{schedule} {caught}"] = {"error": error, "took_s": took_s, "again": snapshot(again)}
    return found


def _one_step_with_boom(model: nn.Module, optimizer: torch.optim.Optimizer, *, caught: bool) -> None:
    rank = dist.get_rank()
    hidden = model.trunk(data(0, rank, 4, 6))
    loss = model.branches[2](hidden).sum() + model.branches[3](hidden).sum()
    # Some branches have had their gradients when the one in the middle raises, and the others get none.
    hidden = Boom.apply(hidden) if rank == 1 else hidden
    loss = loss + model.branches[0](hidden).sum() + model.branches[1](hidden).sum()
    try:
        loss.backward()
    except ValueError:
        if not caught:
            raise
    optimizer.step()
    optimizer.zero_grad()


def _again(model: nn.Module, text: str) -> None:
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, f"bsp / all_reduce / none / {text}", timeout_s=10):
        _train(model, optimizer, in_any_order)


@pytest.fixture(scope="module")
def interruptions() -> list[RankResult]:
    return run_processes("tests.runtime.test_schedules_robust:interrupted", world_size=2, timeout_s=80)


@every_schedule
@pytest.mark.parametrize("caught", [False, True], ids=["let pass", "caught"])
def test_an_exception_in_the_middle_of_backward(
    schedule: str, caught: bool, interruptions: list[RankResult], unlike: list[RankResult]
) -> None:
    other, struck = (result.value[f"{schedule} {caught}"] for result in interruptions)
    if caught:
        assert struck["error"].startswith("CommunicationError: the backward pass of step 12 has not exchanged all")
        assert "rank 1 raised CommunicationError: the backward pass of step 12" in other["error"]
    else:
        assert struck["error"] == "ValueError: the gradient broke"
        assert "rank 1 raised ValueError: the gradient broke" in other["error"]
    assert other["error"].startswith("PeerLost")
    assert other["took_s"] < 5, "told at once, not by its time limit"
    for result in interruptions:
        assert_equal(result.value[f"{schedule} {caught}"]["again"], unlike[0].value["in_any_order ddp"])
