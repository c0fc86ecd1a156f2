"""Training with servers, ranks and servers being threads of this process."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn

import laconic
from laconic.core.event import Event
from laconic.core.in_process import InProcessTransport
from laconic.errors import AttachError, CommunicationError
from laconic.runtime.servers.protocol import OPTIMIZERS
from tests.core.sockets import nothing_left
from tests.runtime.replicas import assert_equal, data, mlp, mlp_loss, reference, sgd, snapshot, train
from tests.runtime.servers.one_worker import FULL, Nothing, alone, close, steps

MAKERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "no momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, maximize=True, weight_decay=0.1),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True),
    "foreach": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=True),
} | {
    name: lambda model, kind=kind: kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    for name, kind in OPTIMIZERS.items()
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_one_worker_trains_as_without_a_server(make) -> None:
    plain = mlp()
    steps(plain, make(plain), 5)

    def run(model: nn.Module, attach) -> None:
        optimizer = make(model)
        with attach(optimizer):
            steps(model, optimizer, 5)

    close(alone(run), snapshot(plain))


def test_two_groups_and_a_schedule() -> None:
    def run(model: nn.Module, attach) -> None:
        first, second = model[0], model[2]
        optimizer = torch.optim.AdamW(
            [{"params": first.parameters(), "lr": 0.05}, {"params": second.parameters(), "weight_decay": 0.3}], lr=0.01
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.01], total_steps=12)
        with attach(optimizer):
            for step in range(10):
                steps(model, optimizer, 1, first=step)
                schedule.step()

    plain = mlp()
    run(plain, lambda _: Nothing())
    close(alone(run), snapshot(plain))


def test_gradients_clipped_before_the_step_are_what_servers_get() -> None:
    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            (100 * mlp_loss(model, step, 0)).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
            optimizer.step()
            assert model[0].weight.grad is not None, "gradients are shown again after the step"
            optimizer.zero_grad()

    plain = mlp()
    clipped(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    def run(model: nn.Module, attach) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(optimizer):
            clipped(model, optimizer)

    close(alone(run), snapshot(plain))


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    def run(model: nn.Module, attach) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        with attach(optimizer):
            for step in range(6):
                scale = float("inf") if step == 2 else 1.0  # an overflow: no step is made
                scaler.scale(mlp_loss(model, step, 0) * scale).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    plain = mlp()
    run(plain, lambda _: Nothing())
    found = alone(run)
    assert all(value.isfinite().all() for value in found.values())
    close(found, snapshot(plain))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = nn.Linear(5, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return getattr(self, head)(self.body(x).tanh())


@pytest.mark.parametrize("compression", ["none", "topk(0.5) + error_feedback"])
def test_parameters_without_gradient_on_a_worker(compression: str) -> None:
    original = TwoHeads()

    def one(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(original)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        strategy = f"asp / parameter_server / {compression}"
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(4):
                model(data(step, transport.rank, 4, 5), "left").square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            session.average()
        return snapshot(model)

    start = snapshot(original)
    for found in laconic.InProcessCluster(2, timeout_s=10).run(one):
        assert torch.equal(found["right.weight"], start["right.weight"]), "no weight decay without a gradient"
        assert not torch.equal(found["left.weight"], start["left.weight"])
        assert not torch.equal(found["body.weight"], start["body.weight"])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shards", [0, 1])
def test_bsp_with_servers_is_bsp(world_size: int, shards: int) -> None:
    strategy = f"bsp / parameter_server(shards={shards})" if shards else "bsp / parameter_server"
    for state in train(mlp(), strategy, world_size=world_size):
        assert_equal(state, reference(mlp(), world_size=world_size))


@pytest.mark.parametrize(
    "strategy", ["asp / parameter_server", "ssp(staleness=2) / parameter_server / int8", "backup(spare=1)"]
)
def test_ranks_may_make_different_numbers_of_steps(strategy: str) -> None:
    def one(transport: InProcessTransport) -> tuple[dict[str, torch.Tensor], int, int]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            steps(model, optimizer, 4 + 6 * transport.rank, rank=transport.rank)
            session.average()
            met = snapshot(model)
            steps(model, optimizer, 3 + 5 * transport.rank, rank=transport.rank)
        return met, session.staleness, session.lead

    first, *others = laconic.InProcessCluster(3, timeout_s=10).run(one)
    for state, _, _ in others:
        assert_equal(state, first[0])
    if strategy.startswith("ssp"):
        assert max(lead for _, _, lead in (first, *others)) <= 2


def test_with_one_slow_worker_the_others_lead_by_the_bound_and_no_more() -> None:
    ahead: list[int] = []

    def one(transport: InProcessTransport) -> tuple[int, int]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "ssp(staleness=3) / parameter_server", transport=transport) as session:
            for step in range(12):
                if transport.rank == 1:
                    time.sleep(0.03)
                    made[1] = step
                steps(model, optimizer, 1, first=step, rank=transport.rank)
                made[transport.rank] = step + 1
                ahead.append(max(made) - min(made))
        return session.lead, session.staleness

    made = [0, 0, 0]
    found = laconic.InProcessCluster(3, timeout_s=10).run(one)
    assert found[0][0] == found[2][0] == 3
    assert max(ahead) <= 4, "a worker learns of its answer a moment after the slow one has pushed"
    assert max(staleness for _, staleness in found) >= 3


class Events:
    """Keeps all events."""

    def __init__(self) -> None:
        self.found: list[Event] = []

    def write(self, event: Event) -> None:
        self.found.append(event)


def test_the_gradients_of_a_slow_worker_are_dropped_counted_and_not_waited_for() -> None:
    """With a bucket per parameter, more than may be in flight elsewhere; the slow worker is stopped until the others
    have made all their steps."""
    done = [threading.Event() for _ in range(3)]

    def one(transport: InProcessTransport) -> tuple[int, list[int], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
        optimizer = sgd(model)
        events = Events()
        strategy = "backup(spare=1) / parameter_server(shards=1) / none / wfbp"
        with laconic.attach(model, optimizer, strategy, transport=transport, events=events) as session:
            assert len(session.plan.buckets) == 12
            for step in range(9):
                if transport.rank == 1 and step == 2:
                    assert done[0].wait(30)
                    assert done[2].wait(30)
                model(data(step, transport.rank, 2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            done[transport.rank].set()
        told = {event.step: event.data["dropped"] for event in events.found if "dropped" in event.data}
        return session.dropped, [int(told[step]) for step in sorted(told)], snapshot(model)

    found = laconic.InProcessCluster(3, timeout_s=30).run(one)
    for dropped, told, model in found:
        assert dropped == sum(told)
        assert len(told) == 9
        assert_equal(model, found[0][2])
    assert found[1][1][2:] == [1] * 7, "the others have made their steps and gone"
    assert found[0][0] + found[2][0] <= 4


@pytest.mark.slow
def test_a_worker_that_missed_updates_comes_to_the_end_of_its_loop() -> None:
    """All make the same number of steps and then wait for each other without laconic."""
    timeout_s, num_steps = 60.0, 30
    met = threading.Barrier(3)

    def one(transport: InProcessTransport) -> tuple[int, float]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "backup(spare=1)", transport=transport) as session:
            for step in range(num_steps):
                if transport.rank == 1 and step == 2:
                    time.sleep(0.5)
                steps(model, optimizer, 1, first=step, rank=transport.rank)
            began_s = time.monotonic()
            met.wait(2 * timeout_s)
            return session.dropped, time.monotonic() - began_s

    found = laconic.InProcessCluster(3, timeout_s=timeout_s).run(one)
    assert found[1][0] > 1, "it was too early to miss several updates"
    assert max(waited_s for _, waited_s in found) < 0.5 * timeout_s


def test_parameters_with_other_strides() -> None:
    def run(attach) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, (2, 3)), nn.Flatten(), nn.Linear(32, 2)).to(
            memory_format=torch.channels_last
        )
        optimizer = sgd(model)
        with attach(model, optimizer):
            for step in range(3):
                model(data(step, 0, 2, 3, 3, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        return snapshot(model)

    def one(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        return run(lambda model, optimizer: laconic.attach(model, optimizer, FULL, transport=transport))

    close(laconic.InProcessCluster(1, timeout_s=10).run(one)[0], run(lambda *_: Nothing()))


def test_nothing_is_left_after_detaching_and_after_an_error() -> None:
    for strategy in ("bsp / parameter_server", "ssp / parameter_server", "asp / gossip"):

        def one(transport: InProcessTransport, strategy: str = strategy, fails: bool = False) -> None:
            model = mlp()
            optimizer = sgd(model)
            with laconic.attach(model, optimizer, strategy, transport=transport):
                steps(model, optimizer, 2, rank=transport.rank)
                if fails and transport.rank == 1:
                    raise ValueError("the data loader broke")
                steps(model, optimizer, 200 if fails else 1, rank=transport.rank)

        with nothing_left():
            laconic.InProcessCluster(3, timeout_s=10).run(one)
        with nothing_left(), pytest.raises(ValueError, match="the data loader broke"):
            laconic.InProcessCluster(3, timeout_s=10).run(lambda transport: one(transport, fails=True))


def test_what_a_server_cannot_do_is_said_at_once() -> None:
    class Mine(torch.optim.SGD):
        """As SGD, but nobody can know."""

    model = mlp()
    transport = laconic.InProcessCluster(1).transport(0)
    with pytest.raises(AttachError, match="a Mine is not among those they can run: SGD, Adam"):
        laconic.attach(model, Mine(model.parameters(), lr=0.1), FULL, transport=transport)
    optimizer = sgd(model)
    transport = laconic.InProcessCluster(1).transport(0)
    attached = laconic.attach(model, optimizer, FULL, transport=transport)
    with attached, pytest.raises(CommunicationError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
