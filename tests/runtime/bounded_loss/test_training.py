"""Training with bounded_loss: replicas stay identical, bytes are as predicted, nothing is left behind."""

from __future__ import annotations

import copy
import signal

import pytest
import torch

import laconic
from laconic.core.event import EventList
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.tensor import TensorSpec
from laconic.runtime.bounded_loss import group
from laconic.strategy import Strategy
from tests.core.sockets import nothing_left
from tests.processes import SignalAfterLine, run_processes
from tests.runtime.in_network.aggregation import Faulty
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, sgd, snapshot

pytestmark = pytest.mark.timeout(90)


def trained(
    strategy: str, *, world_size: int = 3, steps: int = 4
) -> list[tuple[dict[str, torch.Tensor], int, int, float, EventList]]:
    """For each rank: the model, the payload bytes that it has sent, those predicted, what was lost, events."""
    first = mlp()  # not in threads, which share torch's generator

    def rank(transport: InProcessTransport) -> tuple[dict[str, torch.Tensor], int, int, float, EventList]:
        model, events = copy.deepcopy(first), EventList()
        optimizer, predicted = sgd(model), 0
        with laconic.attach(model, optimizer, strategy, transport=transport, events=events) as session:
            for step in range(steps):
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            tensors = [TensorSpec(name, tuple(p.shape)) for name, p in model.named_parameters()]
            parsed = Strategy.parse(strategy)
            moment = Moment.steady(world_size, transport.rank)
            for bucket in parsed.plan(tensors, world_size).buckets:
                predicted += steps * parsed.architecture.sent_bytes(bucket, parsed.codec, moment)
            lost = session.lost_ratio
        return snapshot(model), transport.traffic.sent_bytes("payload"), predicted, lost, events

    with nothing_left():
        return InProcessCluster(world_size).run(rank)


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_replicas_are_identical_and_near_an_all_reduce(compression: str) -> None:
    found = trained(f"bsp / bounded_loss / {compression}")
    usual = trained(f"bsp / all_reduce / {compression}")
    for model, sent, predicted, lost, events in found:
        assert_equal(model, found[0][0])
        assert sent == predicted
        assert lost == 0
        ratios = [event.data["lost_ratio"] for event in events.events if event.kind == "exchange"]
        assert ratios
        assert set(ratios) == {0.0}
        for name, value in model.items():
            near = 1e-5 if compression == "none" else 2e-2
            torch.testing.assert_close(value, usual[0][0][name], rtol=near, atol=near)


def test_with_loss_replicas_are_identical_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(100))

    def faulty(host: str, *, send_bytes: int) -> Faulty:
        return Faulty(next(seeds), lost=0.1, doubled=0.1, late=0.02)

    monkeypatch.setattr(group, "Datagrams", faulty)
    usual = trained("bsp / all_reduce", steps=10)
    for _ in range(5):
        found = trained("bsp / bounded_loss(tolerate=0.2)", steps=10)
        # On a busy machine exchanges take long, and what is lost is sent again in time.
        if any(lost > 0 for *_, lost, _ in found):
            break
    else:
        pytest.fail("nothing was lost in 50 steps")
    for model, *_ in found:
        assert_equal(model, found[0][0])
        # A tenth of the frames is lost, and what is missing is replaced by the others' mean.
        moved = sum((value - usual[0][0][name]).norm() ** 2 for name, value in model.items()) ** 0.5
        assert moved < 0.1 * sum(value.norm() ** 2 for value in model.values()) ** 0.5


def test_outer_steps_and_a_single_rank() -> None:
    for model, *_ in (found := trained("diloco(period=2) / bounded_loss", world_size=2)):
        assert_equal(model, found[0][0])
    trained("diloco(period=2) / bounded_loss", world_size=1)


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_is_killed_is_named_in_bounded_time() -> None:
    results = run_processes(
        "tests.runtime.servers.ranks:stops",
        world_size=3,
        arguments={"strategy": "bsp / bounded_loss", "victim": 2, "how": "wait", "timeout_s": 20.0},
        send_signal=SignalAfterLine(2, "ready", signal.SIGKILL),
        timeout_s=60,
    )
    for result in results[:2]:
        assert result.value["error"].startswith("PeerLost")
        assert "rank 2 stopped answering" in result.value["error"]
        assert result.value["seconds"] < 15
