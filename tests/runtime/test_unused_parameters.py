"""Parameters that some steps or some ranks do not use, against the average computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CommunicationError
from tests.runtime.awkward import SCHEDULES, Branches, every_schedule, strategy
from tests.runtime.replicas import assert_equal, data, loop, mlp, mlp_loss, reference, sgd, train


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Decay and momentum tell "no gradient" from "a gradient of zero".
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


@every_schedule
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_parameters_unused_in_some_steps_and_on_some_ranks(schedule: str, make_optimizer) -> None:
    # Step by step, what ranks 0, 1 and 2 use: everything, unlike parts, nothing of one branch anywhere.
    pattern = [("lr", "lr", "lr"), ("l", "r", "lr"), ("l", "l", "l"), ("", "r", ""), ("", "", ""), ("lr", "", "lr")]

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 4, 5), pattern[step][rank]).square().mean()

    arguments = {"loss": loss, "make_optimizer": make_optimizer, "world_size": 3, "steps": len(pattern)}
    states = train(Branches(), strategy(schedule), **arguments)
    expected = reference(Branches(), **arguments)
    for state in states:
        assert_equal(state, expected)


def test_unused_parameters_first_seen_in_the_first_step() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 4, 5), "l" if rank == 0 else "r").square().mean()

    states = train(Branches(), loss=loss)
    assert_equal(states[0], reference(Branches(), loss=loss))
    assert_equal(states[0], states[1])


def test_a_gradient_that_is_zero_is_not_taken_for_a_missing_one() -> None:
    # right's gradient is exactly zero, yet it is used: weight decay must act on it.
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        hidden = model.trunk(data(step, rank, 4, 5))
        return (model.left(hidden) + 0.0 * model.right(hidden)).square().mean()

    states = train(Branches(), loss=loss, make_optimizer=adamw)
    assert_equal(states[0], reference(Branches(), loss=loss, make_optimizer=adamw))


def test_asking_who_used_what_costs_control_bytes_only_when_it_matters() -> None:
    def one_rank(transport: InProcessTransport) -> list[int]:
        model = Branches()
        optimizer = sgd(model)
        costs = []
        with laconic.attach(model, optimizer, "bsp", transport=transport) as session:
            model.never.requires_grad_(False)
            for step, used in enumerate(["lr", "lr", "l"]):
                before = session.traffic.sent_bytes("control")
                (model(data(step, transport.rank, 4, 5), used).square().mean() + model.never.weight.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                costs.append(session.traffic.sent_bytes("control") - before)
        return costs

    # `never` is frozen after attaching, so it gets no gradient: one byte per parameter is exchanged in every step.
    num_parameters = len(list(Branches().parameters()))
    costs = laconic.InProcessCluster(2).run(one_rank)[0]
    assert costs[1:] == [num_parameters, num_parameters]

    def whole_model(transport: InProcessTransport) -> list[int]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "bsp", transport=transport) as session:
            costs = []
            for step in range(3):
                before = session.traffic.sent_bytes("control")
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                costs.append(session.traffic.sent_bytes("control") - before)
        return costs

    assert laconic.InProcessCluster(2).run(whole_model)[0][1:] == [0, 0]


def test_a_broken_promise_that_all_parameters_are_used_is_named() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 4, 5), "l").square().mean()

    with pytest.raises(CommunicationError, match=r"right\.weight.*find_unused_parameters=True"):
        train(Branches(), loss=loss, find_unused_parameters=False)
    train(mlp(), find_unused_parameters=False)


def test_a_parameter_used_only_while_accumulating() -> None:
    def body(model, optimizer, session, rank):
        with session.accumulate():
            model(data(0, rank, 4, 5), "l").square().mean().backward()
        model(data(1, rank, 4, 5), "r").square().mean().backward()
        optimizer.step()

    def loss(model, step, rank):
        return model(data(0, rank, 4, 5), "l").square().mean() + model(data(1, rank, 4, 5), "r").square().mean()

    states = loop(body, model=Branches)
    expected = reference(Branches(), loss=loss, steps=1)
    for name, value in states[0].items():
        torch.testing.assert_close(value, expected[name])
    assert_equal(*states)


def test_a_rank_whose_loss_touches_no_parameter_takes_part_with_nothing() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor | None:
        return None if (step, rank) in ((0, 0), (2, 1)) else mlp_loss(model, step, rank)

    for schedule in SCHEDULES:
        states = train(mlp(), strategy(schedule), loss=loss, steps=4)
        assert_equal(states[0], reference(mlp(), loss=loss, steps=4))
        assert_equal(*states)


def test_what_error_feedback_owes_reaches_a_parameter_nobody_used() -> None:
    owed: dict[str, float] = {}

    def body(model, optimizer, session, rank):
        model(data(0, rank, 4, 5), "lr").square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fields = session.state_dict()["ranks"][str(rank)]["right.weight"]
        owed[f"{rank}"] = float(fields["error_feedback.residual"].abs().sum())
        model(data(1, rank, 4, 5), "l").square().mean().backward()
        gradient = model.right.weight.grad
        assert gradient is not None
        assert gradient.any()
        assert model.never.weight.grad is None
        optimizer.step()

    states = loop(body, model=Branches, how="bsp / all_reduce / bf16 + error_feedback / wfbp")
    assert all(value > 0 for value in owed.values())
    assert_equal(*states)
