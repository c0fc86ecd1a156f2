"""Parameters that some steps or some ranks do not use, against the average computed by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CommunicationError
from tests.processes import gloo_group, run_processes
from tests.runtime.awkward import SCHEDULES, Branches, every_schedule, strategy
from tests.runtime.replicas import assert_equal, data, loop, mlp, mlp_loss, reference, sgd, snapshot, train


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

    # `never` is frozen after attaching, so it gets no gradient: one byte per parameter and one more in every step.
    num_parameters = len(list(Branches().parameters()))
    costs = laconic.InProcessCluster(2).run(one_rank)[0]
    assert costs[1:] == [num_parameters + 1, num_parameters + 1]

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


def every_branch(model: nn.Module, inputs: torch.Tensor, used: str) -> torch.Tensor:
    """Branches with `never` as a third one, "n"."""
    hidden = torch.tanh(model.trunk(inputs))
    parts = {"l": model.left, "r": model.right, "n": model.never}
    return sum((parts[name](hidden).sum() for name in used), hidden.sum())


def test_only_ranks_that_all_miss_something_ask_each_other() -> None:
    # Step by step what ranks 0 and 1 use. One that uses everything answers for all: nobody else is asked.
    pattern = [("lrn", "lrn"), ("lrn", "lrn"), ("lr", "lrn"), ("l", "rn"), ("lrn", "l"), ("lr", "lrn"), ("lrn", "lrn")]
    costs: dict[int, list[int]] = {0: [], 1: []}

    def body(model, optimizer, session, rank):
        for step, used in enumerate(pattern):
            before = session.traffic.sent_bytes("control")
            every_branch(model, data(step, rank, 4, 5), used[rank]).backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            costs[rank].append(session.traffic.sent_bytes("control") - before)

    states = loop(body, model=Branches)
    asked = len(list(Branches().parameters())) + 1
    # Having asked once they go on, until somebody has used everything.
    assert costs[1][1:] == [0, 0, asked, asked, 0, 0]
    assert sum(costs[0][1:]) == 2 * asked
    assert_equal(*states)


ANY_STRATEGY = [
    "bsp / all_reduce / none / priority(partition_bytes=1KiB)",
    "bsp / all_reduce / none / dear(bytes=100B)",
    "bsp / parameter_server(shards=2) / none / fusion(100B, 50B)",
    "bsp / all_reduce / bf16 + error_feedback / dear(bytes=100B)",
    "bsp / all_reduce / topk(density=0.3) + error_feedback / fusion(100B, 50B)",
    "bsp / all_reduce / powersgd(rank=1) / wfbp",
    "bsp / all_reduce / int8 / mg_wfbp",
]


@pytest.mark.parametrize("how", ANY_STRATEGY)
def test_replicas_agree_on_what_nobody_used_under_every_compressor_and_schedule(how: str) -> None:
    pattern = [
        ("lrn", "lrn", "lrn"),
        ("l", "r", "lrn"),
        ("l", "l", "l"),
        ("", "r", "l"),
        ("", "", ""),
        ("lrn", "", "n"),
    ]
    nothing: dict[int, list[set[str]]] = {0: [], 1: [], 2: []}

    def body(model, optimizer, session, rank):
        for step, used in enumerate(pattern):
            every_branch(model, data(step, rank, 4, 5), used[rank]).square().backward()
            nothing[rank].append({name for name, parameter in model.named_parameters() if parameter.grad is None})
            optimizer.step()
            optimizer.zero_grad()

    states = loop(body, model=Branches, how=how, world_size=3, make_optimizer=adamw)
    assert_equal(states[0], states[1])
    assert_equal(states[0], states[2])
    assert nothing[0] == nothing[1] == nothing[2]
    if "/ none /" in how:
        unused = [{name for name in "lrn" if not any(name in used for used in step)} for step in pattern]
        full = {"l": "left", "r": "right", "n": "never"}
        assert nothing[0] == [{f"{full[n]}.{kind}" for n in names for kind in ("weight", "bias")} for names in unused]


@every_schedule
def test_a_gradient_left_from_a_step_before_stays_as_it_is_when_nobody_uses_its_parameter(schedule: str) -> None:
    def body(model, optimizer, session, rank):
        every_branch(model, data(7, rank, 4, 5), "lr").backward()  # after which buckets stay where they are
        model.zero_grad()
        for step, used in enumerate(["lr", "l", "l"]):
            every_branch(model, data(step, rank, 4, 5), used).square().backward()
            if step == 0:
                left = model.right.weight.grad.clone()
            # A sum of thirds would not even be the same number.
            assert torch.equal(model.right.weight.grad, left)
            optimizer.step()
            model.left.zero_grad()

    states = loop(body, model=Branches, how=strategy(schedule), world_size=3)
    assert_equal(states[0], states[2])


def test_a_parameter_without_elements_has_no_gradient_where_nobody_uses_it() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 3)
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.nothing_else = nn.Parameter(torch.zeros(0, dtype=torch.float64))  # a bucket of its own

    for schedule in (*SCHEDULES, "dear(bytes=100B)"):

        def body(model, optimizer, session, rank):
            for step in range(3):
                model.layer(data(step, rank, 4, 5)).square().mean().backward()
                assert model.nothing.grad is None
                assert model.nothing_else.grad is None
                optimizer.step()
                optimizer.zero_grad()

        assert_equal(*loop(body, model=Empty, how=strategy(schedule)))


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@every_schedule
def test_an_undefined_gradient_of_a_custom_function_counts_as_none(schedule: str) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        hidden = torch.tanh(model.trunk(data(step, rank, 4, 5)))
        right = model.right(hidden)
        return (model.left(hidden) + (right if step == 2 and rank == 1 else Stop.apply(right))).square().mean()

    states = train(Branches(), strategy(schedule), loss=loss, make_optimizer=adamw)
    assert_equal(states[0], reference(Branches(), loss=loss, make_optimizer=adamw))
    assert_equal(*states)
    with pytest.raises(CommunicationError, match=r"right\.weight.*find_unused_parameters=True"):
        train(Branches(), loss=loss, find_unused_parameters=False)


# -- beside DDP ------------------------------------------------------------------------------------------------------


class Alternating(nn.Module):
    """Parameters of about 3 MB, of which each pass leaves some out; registered in another order than they are used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(300, 5)
        self.ways = nn.ModuleList(nn.Linear(200, 300) for _ in range(3))
        self.precise = nn.Linear(5, 5).double()
        self.first = nn.Linear(20, 200)
        self.large = nn.Linear(200, 2000)

    def forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        out = self.head(torch.relu(self.ways[number % 3](hidden)))
        if number % 2:
            out = self.precise(out.double()).float() + self.large(hidden).mean()
        return out


def beside_ddp(size: str, first_size: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train with torch DDP and with laconic, ranks using parameters differently; what both end with."""
    found = {}
    with gloo_group():
        rank = dist.get_rank()
        for kind in ("ddp", "laconic"):
            model = Alternating()
            forward: nn.Module = model
            optimizer = adamw(model)
            session = None
            if kind == "ddp":
                forward = DistributedDataParallel(model, find_unused_parameters=True)
            else:
                how = f"bsp / all_reduce / none / fusion({size}, {first_size})"
                session = laconic.attach(model, optimizer, how, find_unused_parameters=True, timeout_s=30)
            for step in range(6):
                forward(data(step, rank, 4, 20), step if step < 3 else step + rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if session is not None:
                assert len(session.plan.buckets) > 2
                assert session.state_dict()["order"] == []
                session.detach()
            found[kind] = snapshot(model)
    return found


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(100)
@pytest.mark.parametrize("world_size", [3, 4])
def test_equal_to_ddp_with_the_same_setting_bit_for_bit(world_size: int) -> None:
    results = run_processes(
        "tests.runtime.test_unused_parameters:beside_ddp",
        world_size=world_size,
        arguments={"size": "25MiB", "first_size": "1MiB"},
        timeout_s=80,
    )
    for result in results:
        assert_equal(result.value["laconic"], result.value["ddp"])
        assert_equal(result.value["laconic"], results[0].value["laconic"])
