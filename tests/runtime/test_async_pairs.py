"""Replicas that average in pairs in the background: with threads, and with real processes."""

from __future__ import annotations

import contextlib
import copy
import signal
import socket
import threading
import time

import pytest
import torch

import laconic
from laconic.core.caller import Caller
from laconic.core.in_process import InProcessTransport
from laconic.errors import CommunicationError
from laconic.runtime.hooks import async_pairs
from tests.core.sockets import nothing_left
from tests.processes import SignalAfterLine, run_processes
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, sgd, snapshot


def steps(model, optimizer, count: int, *, first: int = 0, rank: int = 0) -> None:
    for step in range(first, first + count):
        mlp_loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("strategy", ["asp / gossip", "asp / gossip(topology=exponential)", "asp / choco / topk(0.5)"])
def test_no_number_of_replicas_deadlocks(strategy: str, world_size: int) -> None:
    def one(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            steps(model, optimizer, 6 + 3 * transport.rank, rank=transport.rank)
            session.average()
            return snapshot(model)

    with nothing_left():
        results = laconic.InProcessCluster(world_size, timeout_s=10).run(one)
    for state in results:
        assert_equal(state, results[0])


@pytest.mark.parametrize("strategy", ["asp / gossip", "asp / choco / bf16"])
def test_averaging_keeps_the_mean_and_brings_replicas_together(strategy: str) -> None:
    original = mlp()

    def one(transport: InProcessTransport) -> tuple[float, float, torch.Tensor]:
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for parameter in model.parameters():  # one step apart, then none
                parameter.grad = torch.full_like(parameter, float(transport.rank) - 1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.state_dict()  # returns when no pair averages any more
            apart = session.consensus_distance()
            for _ in range(60):
                optimizer.step()
                time.sleep(0.002)
            session.state_dict()
            together = session.consensus_distance()
            session.average()
            return apart, together, torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])

    start = torch.cat([parameter.detach().view(-1) for parameter in original.parameters()])
    for apart, together, mean in laconic.InProcessCluster(3, timeout_s=10).run(one):
        assert together < 0.2 * apart or apart < 1e-3
        tolerance = 1e-5 if "gossip" in strategy else 0.02
        torch.testing.assert_close(mean, start, rtol=0, atol=tolerance)  # gradients -1, 0 and 1 cancel


def _send_nonsense(address: tuple[str, int], token: bytes, numel: int) -> list[Caller]:
    """As from the neighbour, and from nobody's; stays connected, because a neighbour that goes is missed."""
    neighbour, nobody = (Caller(address, token=token, rank=rank, timeout_s=5) for rank in (0, 7))
    right = [torch.ones(numel)]
    for caller, kind, tensors, note, told in (
        (neighbour, 9, [], "0", "knows no request of kind 9"),
        (neighbour, 1, [], "0", "of another model"),
        (neighbour, 1, [torch.ones(3)], "0", "of another model"),
        (neighbour, 1, right * 2, "0", "of another model"),
        (neighbour, 1, right, "now", "did not say in which step it is"),
        (neighbour, 1, right, "9" * 5000, "did not say in which step it is"),
        (nobody, 1, right, "0", "rank 1 has no neighbour 7"),
    ):
        with pytest.raises(CommunicationError, match=told):
            caller.call(kind, 0, tensors, note).wait()
    return [neighbour, nobody]


@pytest.mark.parametrize("strategy", ["asp / gossip", "asp / choco / topk(0.5)"])
def test_what_a_neighbour_cannot_mean_is_refused_and_changes_nothing(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening: dict[str, tuple[tuple[str, int], bytes]] = {}

    class Noting(async_pairs.Listener):
        def __init__(self, handler, *, address, token, name, **options) -> None:
            super().__init__(handler, address=address, token=token, name=name, **options)
            listening[name] = (self.address, token)

    monkeypatch.setattr(async_pairs, "Listener", Noting)

    def one(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        outsiders: list[Caller] = []
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            saved, before = copy.deepcopy(session.state_dict()), snapshot(model)
            if transport.rank == 1:
                outsiders += _send_nonsense(*listening["replica 1"], session.plan.buckets[0].numel)
            assert_equal(snapshot(model), before)
            again = session.state_dict()
            for name, fields in saved["ranks"][str(transport.rank)].items():
                assert_equal(again["ranks"][str(transport.rank)][name], fields)
            steps(model, optimizer, 3, rank=transport.rank)
        for caller in outsiders:
            caller.close()

    laconic.InProcessCluster(2, timeout_s=10).run(one)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_real_processes_train_and_leave_nothing_behind() -> None:
    strategies = ["asp / gossip", "asp / choco / topk(density=0.3)"]
    results = run_processes(
        "tests.runtime.servers.ranks:losses", world_size=3, arguments={"strategies": strategies, "steps": 60}
    )
    for strategy in strategies:
        for result in results:
            found = result.value[strategy]
            assert found["after"] < 0.6 * found["before"], (strategy, found["before"], found["after"])
            assert_equal(found["model"], results[0].value[strategy]["model"])
            assert found["left"] == [[], 0], strategy


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_neighbour_that_is_lost_is_named(how: str) -> None:
    results = run_processes(
        "tests.runtime.servers.ranks:stops",
        world_size=3,
        arguments={"strategy": "asp / gossip", "victim": 1, "how": how},
        send_signal=SignalAfterLine(rank=1, line="ready", signal=signal.SIGKILL) if how == "kill" else None,
        timeout_s=60,
    )
    for survivor in (results[0], results[2]):
        assert "rank 1" in survivor.value["error"]
        assert survivor.value["seconds"] < 10
        if how == "raise":
            assert "rank 1 raised ValueError: the data loader broke" in survivor.value["error"]


def test_garbage_at_the_port_of_a_replica_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[tuple[str, int]] = []

    class Noting(async_pairs.Listener):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            addresses.append(self.address)

    monkeypatch.setattr(async_pairs, "Listener", Noting)

    def one(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "asp / gossip", transport=transport):
            for step in range(10):
                with socket.create_connection(addresses[step % 2], timeout=5) as sock:
                    sock.sendall(b"\x00\xff" * 200 if step % 2 else b"LCNC")
                steps(model, optimizer, 1, first=step, rank=transport.rank)

    with nothing_left():
        laconic.InProcessCluster(2, timeout_s=10).run(one)


def test_nothing_waits_for_a_background_that_has_failed_in_the_middle_of_a_step() -> None:
    """The error comes after the step has looked for one, and before it asks for the next average."""

    def one(transport: InProcessTransport) -> float:
        model = mlp()
        optimizer = sgd(model)
        session = laconic.attach(model, optimizer, "asp / gossip", transport=transport)
        hooks = session._hooks
        assert isinstance(hooks, async_pairs.AsyncPairHooks)
        if transport.rank == 0:
            hooks._error = laconic.errors.PeerLost("rank 1 has gone.", rank=1)
            hooks._ready.set()
            hooks._thread.join(timeout=5)  # type: ignore[union-attr]
            hooks.after_step()
        began_s = time.monotonic()
        with pytest.raises(CommunicationError):
            session.detach()
        return time.monotonic() - began_s

    assert laconic.InProcessCluster(2, timeout_s=8).run(one)[0] < 6.0


def test_who_ends_because_of_a_neighbour_says_so_before() -> None:
    """A rank that waits for the one that ends must not take it for the cause."""
    told = threading.Event()

    def one(transport: InProcessTransport) -> int | None:
        model = mlp()
        session = laconic.attach(model, sgd(model), "asp / gossip", transport=transport)
        hooks = session._hooks
        assert isinstance(hooks, async_pairs.AsyncPairHooks)
        try:
            if transport.rank == 0:
                hooks.left(1, "closed the connection")
                with pytest.raises(laconic.errors.PeerLost, match="rank 1 closed the connection"):
                    hooks.before_step(closure=False)
                told.set()
                return 1
            assert told.wait(10)
            with pytest.raises(laconic.errors.PeerLost, match="rank 1 was lost, says rank 0") as caught:
                transport.raise_if_peer_failed()
            return caught.value.rank
        finally:
            with contextlib.suppress(CommunicationError):
                session.detach()

    assert laconic.InProcessCluster(3, timeout_s=8).run(one) == [1, 1, 1]
