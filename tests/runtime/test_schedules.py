"""Every schedule trains as if everything were exchanged at once, whatever it sends when, and whatever a model does."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CommunicationError
from laconic.runtime.hooks.lazy_gradient import LazyGradient
from laconic.runtime.job import Job
from laconic.scheduling import SCHEDULES
from tests.runtime.replicas import (
    Loss,
    MakeOptimizer,
    assert_equal,
    data,
    mlp,
    mlp_loss,
    reference,
    sgd,
    snapshot,
    train,
)

pytestmark = pytest.mark.timeout(60)

SETTLED = 28
"""Steps after which every schedule has found its plan and has followed it for a while."""
FINE = {
    "priority": "priority(partition_bytes=1024, credit_bytes=2048)",
    "dear": "dear(bytes=512)",
    "fusion": "fusion(bytes=512, first_bytes=128)",
}
NAMES = [*SCHEDULES.names(), *FINE.values()]
DEFERRING = ["priority", FINE["priority"], "dear", FINE["dear"]]
every_schedule = pytest.mark.parametrize("schedule", NAMES)
every_deferring = pytest.mark.parametrize("schedule", DEFERRING)


class Awkward(nn.Module):
    """A tied weight, a layer used twice, a normalization, and one layer too large for a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.wide = nn.Linear(12, 40)
        self.norm = nn.LayerNorm(40)
        self.narrow = nn.Linear(40, 12)
        self.twice = nn.Linear(12, 12)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(self.embedding(tokens).tanh())
        hidden = self.narrow(self.norm(self.wide(hidden)).relu())
        return self.head(self.twice(hidden))


def awkward() -> nn.Module:
    torch.manual_seed(0)
    return Awkward()


def awkward_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    small = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    large = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    return torch.optim.AdamW([{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2)


def strategy(schedule: str, architecture: str = "all_reduce") -> str:
    return f"bsp / {architecture} / none / {schedule}"


@every_schedule
@pytest.mark.parametrize(("make_model", "loss"), [(mlp, mlp_loss), (awkward, awkward_loss)], ids=["mlp", "awkward"])
@pytest.mark.parametrize("make_optimizer", [pytest.param(sgd, marks=pytest.mark.slow), adam], ids=["sgd", "adam"])
def test_lossless_means_lossless(schedule: str, make_model, loss: Loss, make_optimizer: MakeOptimizer) -> None:
    model = make_model()
    states = train(model, strategy(schedule), loss=loss, make_optimizer=make_optimizer, world_size=2, steps=SETTLED)
    expected = reference(model, loss=loss, make_optimizer=make_optimizer, world_size=2, steps=SETTLED)
    for state in states:
        assert_equal(state, expected)


@pytest.mark.slow
@every_schedule
def test_with_servers(schedule: str) -> None:
    model = awkward()
    states = train(
        model, strategy(schedule, "parameter_server(shards=2)"), loss=awkward_loss, world_size=2, steps=SETTLED
    )
    expected = reference(model, loss=awkward_loss, world_size=2, steps=SETTLED)
    for state in states:
        assert_equal(state, expected)


def trained(schedule: str, steps, *, model: nn.Module | None = None, world_size: int = 2) -> list[dict]:
    """Replicas after `steps(replica, optimizer, session, rank)`."""
    model = model or awkward()

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = copy.deepcopy(model)
        optimizer = sgd(replica)
        with laconic.attach(replica, optimizer, strategy(schedule), transport=transport) as session:
            steps(replica, optimizer, session, transport.rank)
        return snapshot(replica)

    return laconic.InProcessCluster(world_size, timeout_s=10).run(one_rank)


@every_deferring
def test_clipping_sees_the_mean(schedule: str) -> None:
    def steps(replica, optimizer, session, rank) -> None:
        for step in range(SETTLED):
            awkward_loss(replica, step, rank).backward()
            norm = nn.utils.clip_grad_norm_(replica.parameters(), 0.05)
            assert norm > 0.05, "so that clipping does something"
            optimizer.step()
            optimizer.zero_grad()

    for state, expected in zip(trained(schedule, steps), trained("fusion", steps), strict=True):
        assert_equal(state, expected)


@every_deferring
def test_a_gradient_that_is_touched_is_the_mean(schedule: str) -> None:
    seen: dict[str, list[torch.Tensor]] = {}

    def steps(replica, optimizer, session, rank) -> None:
        for step in range(9):
            awkward_loss(replica, step, rank).backward()
            if step == 8:
                gradients = [parameter.grad for parameter in replica.parameters()]
                if session.plan.deferred:
                    assert any(isinstance(gradient, LazyGradient) for gradient in gradients)
                seen[f"{session.strategy.scheduling.name} {rank}"] = [gradient + 0 for gradient in gradients]
            optimizer.step()
            optimizer.zero_grad()

    trained(schedule, steps)
    trained("fusion", steps)
    names = list(seen)
    for name in names[1:]:
        for one, other in zip(seen[names[0]], seen[name], strict=True):
            assert torch.equal(one, other)


@every_deferring
def test_the_learning_rate_is_that_of_the_step(schedule: str) -> None:
    """A scheduler changes it before updates that were held back are made."""

    def steps(replica, optimizer, session, rank) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        for step in range(SETTLED):
            awkward_loss(replica, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        session.wait()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.8**SETTLED)
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(list(replica.parameters()))]

    for state, expected in zip(trained(schedule, steps), trained("fusion", steps), strict=True):
        assert_equal(state, expected)


@pytest.mark.slow
@every_deferring
@pytest.mark.parametrize("clear", [None, True, False], ids=["never cleared", "to none", "to zero"])
def test_gradients_are_there_after_the_step(schedule: str, clear: bool | None) -> None:
    def steps(replica, optimizer, session, rank) -> None:
        for step in range(SETTLED):
            (1e-2 * awkward_loss(replica, step, rank)).backward()
            optimizer.step()
            if step % 2:
                assert all(parameter.grad is not None for parameter in replica.parameters())
            if clear is not None:
                optimizer.zero_grad(set_to_none=clear)

    for state, expected in zip(trained(schedule, steps), trained("fusion", steps), strict=True):
        assert_equal(state, expected)


@every_deferring
def test_saving_in_the_middle_sees_the_update(schedule: str) -> None:
    saved: dict[str, tuple[dict, dict]] = {}

    def steps(replica, optimizer, session, rank) -> None:
        for step in range(9):
            awkward_loss(replica, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            saved[session.strategy.scheduling.name] = (snapshot(replica), copy.deepcopy(optimizer.state_dict()))

    trained(schedule, steps)
    trained("fusion", steps)
    (ours, our_optimizer), (theirs, their_optimizer) = saved.values()
    assert_equal(ours, theirs)
    for index, state in their_optimizer["state"].items():
        assert torch.equal(our_optimizer["state"][index]["momentum_buffer"], state["momentum_buffer"])


@every_deferring
def test_accumulation_and_unused_layers(schedule: str) -> None:
    def steps(replica, optimizer, session, rank) -> None:
        for step in range(SETTLED):
            with session.accumulate():
                awkward_loss(replica, 100 + step, rank).backward()
            if step % 3 == rank:  # this rank uses one layer alone, and the other may not use it at all
                replica.twice(data(step, rank, 3, 12)).square().mean().backward()
            else:
                awkward_loss(replica, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    for state, expected in zip(trained(schedule, steps), trained("fusion", steps), strict=True):
        assert_equal(state, expected)


class Borrowing(nn.Module):
    """One layer's weight is used by the model itself; `late` says from which forward pass on."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.lender = nn.Linear(6, 6)
        self.calls = 0
        self.late = late

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.first(inputs)
        return functional.linear(hidden, self.lender.weight) if self.calls > self.late else self.lender(hidden)


@every_deferring
def test_a_borrowed_weight_is_up_to_date(schedule: str) -> None:
    torch.manual_seed(0)
    model = Borrowing(late=0)
    for state in train(model, strategy(schedule), steps=SETTLED):
        assert_equal(state, reference(model, steps=SETTLED))


def test_a_weight_borrowed_late_is_noticed() -> None:
    torch.manual_seed(0)
    model = Borrowing(late=8)

    def one_rank(transport: InProcessTransport) -> None:
        replica = copy.deepcopy(model)
        optimizer = sgd(replica)
        with laconic.attach(replica, optimizer, strategy("priority(merge=false)"), transport=transport):
            for step in range(12):
                mlp_loss(replica, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(CommunicationError, match=r'parameter "lender.weight" was used in step \d+ before its update'):
        laconic.InProcessCluster(2, timeout_s=10).run(one_rank)


@every_schedule
def test_an_exception_in_the_middle_of_backward_is_an_error_and_no_hang(schedule: str) -> None:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("boom")

    both_have_seen_it = threading.Barrier(2, timeout=10)

    def one_rank(transport: InProcessTransport) -> str:
        replica = mlp()
        optimizer = sgd(replica)
        with laconic.attach(replica, optimizer, strategy(schedule), transport=transport):
            for step in range(8):
                mlp_loss(replica, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            hidden = replica[1](replica[0](data(0, transport.rank, 4, 5)))
            with pytest.raises(RuntimeError, match="boom"):
                replica[2](Boom.apply(hidden)).sum().backward()
            with pytest.raises(CommunicationError, match="interrupted"):
                optimizer.step()
            both_have_seen_it.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        laconic.InProcessCluster(2, timeout_s=5).run(one_rank)


@every_schedule
def test_gradients_may_come_in_another_order_on_one_rank(schedule: str) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(5, 30), nn.Linear(5, 30)

        def forward(self, inputs: torch.Tensor, swapped: bool) -> torch.Tensor:
            parts = [self.left, self.right]
            return sum(part(inputs).square().mean() for part in (reversed(parts) if swapped else parts))

    torch.manual_seed(0)
    model = Branches()

    def loss(replica: nn.Module, step: int, rank: int) -> torch.Tensor:
        return replica(data(step, rank, 4, 5), (step + rank) % 2 == 0)

    states = train(model, strategy(schedule), loss=loss, steps=SETTLED)
    assert_equal(states[0], states[1])
    for name, value in reference(model, loss=loss, steps=SETTLED).items():
        assert torch.allclose(states[0][name], value, rtol=1e-5, atol=1e-7)


def test_pieces_are_saved_as_the_parameters_they_belong_to() -> None:
    text = f"bsp / all_reduce / fp16 + error_feedback / {FINE['priority']}"
    model = awkward()

    def one_rank(transport: InProcessTransport) -> None:
        def attached(replica: nn.Module):
            optimizer = sgd(replica)
            return optimizer, laconic.attach(replica, optimizer, text, transport=transport)

        def step(replica: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            awkward_loss(replica, number, transport.rank).backward()
            optimizer.step()
            optimizer.zero_grad()

        first = copy.deepcopy(model)
        optimizer, session = attached(first)
        with session:
            for number in range(9):
                step(first, optimizer, number)
            assert any(tensor.part_of for bucket in session.plan.buckets for tensor in bucket.tensors)
            saved = [copy.deepcopy(part.state_dict()) for part in (first, optimizer, session)]
            names = {name for name, _ in first.named_parameters()}
            assert set(saved[2]["ranks"][str(transport.rank)]) == names
            for number in range(9, 12):
                step(first, optimizer, number)
        second = copy.deepcopy(model)
        optimizer, session = attached(second)
        with session:
            for part, state in zip((second, optimizer, session), saved, strict=True):
                part.load_state_dict(state)
            for number in range(9, 12):
                step(second, optimizer, number)
        assert_equal(snapshot(first), snapshot(second))

    laconic.InProcessCluster(2, timeout_s=10).run(one_rank)


@every_deferring
def test_bytes_are_as_predicted(schedule: str) -> None:
    def steps(replica, optimizer, session, rank) -> None:
        for step in range(SETTLED + 4):
            before = session.traffic.sent_bytes("payload")
            predicted = session.predicted_bytes_per_step()
            awkward_loss(replica, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.wait()
            if step > 0:
                assert session.traffic.sent_bytes("payload") - before == predicted

    trained(schedule, steps, world_size=3)


def test_detaching_leaves_no_hook_and_no_lazy_gradient() -> None:
    model = awkward()

    def one_rank(transport: InProcessTransport) -> None:
        replica = copy.deepcopy(model)
        optimizer = sgd(replica)
        with laconic.attach(replica, optimizer, strategy("dear"), transport=transport):
            for step in range(5):
                awkward_loss(replica, step, transport.rank).backward()
                optimizer.step()
                copied = copy.deepcopy(replica)
        assert not any(module._forward_pre_hooks for module in replica.modules())
        assert not replica._state_dict_pre_hooks
        assert not optimizer._optimizer_state_dict_pre_hooks
        kinds = {name: type(parameter.grad) for name, parameter in replica.named_parameters()}
        assert set(kinds.values()) == {torch.Tensor}, kinds
        awkward_loss(copied, 0, 0).backward()

    laconic.InProcessCluster(2, timeout_s=10).run(one_rank)


@pytest.mark.parametrize("schedule", ["wfbp", "fusion(bytes=64, first_bytes=16)"])
def test_exchanges_may_be_held_until_a_backward_pass_has_ended(schedule: str) -> None:
    """In every second step; in every bit the parameters are those of steps in which nothing is held."""
    first = mlp()

    def one_rank(transport: InProcessTransport) -> tuple[list[bool], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        begun: list[bool] = []
        found: list[dict[str, torch.Tensor]] = []
        for holds in (True, False):
            model = copy.deepcopy(first)
            optimizer = sgd(model)
            strategy = f"bsp / all_reduce / none / {schedule}"
            with laconic.attach(model, optimizer, strategy, transport=transport) as session:
                jobs: list[Job] = []
                submitted: list[int] = []

                def step_made(job: Job, *, holds: bool = holds, jobs: list[Job] = jobs) -> None:
                    job.after_backward = holds and job.step % 2 == 0
                    jobs[:] = [job]

                def last_gradient(_: torch.Tensor, jobs: list[Job] = jobs, submitted: list[int] = submitted) -> None:
                    submitted.extend(job.engine.num_submitted for job in jobs)

                session.call_after_step(step_made)
                next(model.parameters()).register_hook(last_gradient)
                for step in range(6):
                    before = jobs[0].engine.num_submitted if jobs else 0
                    mlp_loss(model, step, transport.rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if holds and step > 0:
                        begun.append(submitted[-1] > before)
            found.append(snapshot(model))
        return begun, found[0], found[1]

    for begun, held, usual in laconic.InProcessCluster(2, timeout_s=20).run(one_rank):
        assert begun == [True, False, True, False, True], "during the backward pass"
        assert_equal(held, usual)
