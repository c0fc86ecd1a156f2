"""attach(): what it refuses, in one line each, and the worlds it must work in."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import AttachError, LaconicError, PeerLost, StrategyError
from tests.runtime.replicas import mlp, mlp_loss, sgd, snapshot


def refused(kind: type[LaconicError], *args: object, **settings: object) -> str:
    with pytest.raises(kind) as caught:
        laconic.attach(*args, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_process_group() -> None:
    model = mlp()
    message = refused(AttachError, model, sgd(model), "bsp")
    assert "init_process_group" in message
    assert "torchrun" in message


def test_what_is_not_a_model_or_an_optimizer() -> None:
    model = mlp()
    assert "torch.nn.Module, got dict" in refused(AttachError, {}, sgd(model), "bsp")
    assert "torch.optim.Optimizer or several, got NoneType" in refused(AttachError, model, None, "bsp")
    assert "timeout_s must be > 0, got 0" in refused(AttachError, model, sgd(model), "bsp", timeout_s=0)
    lbfgs = torch.optim.LBFGS(model.parameters())
    assert "LBFGS decides by the loss of its own rank" in refused(AttachError, model, lbfgs, "bsp")
    lazy = nn.Sequential(nn.LazyLinear(3))
    assert 'parameter "0.weight" has no shape yet' in refused(
        AttachError, lazy, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), "bsp"
    )
    with torch.device("meta"):
        empty, frozen = mlp(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    assert '"0.weight" is on the meta device and has no values yet' in refused(AttachError, empty, sgd(empty), "bsp")
    mixed = nn.Sequential(model, frozen)
    assert '"1.0.weight" is on the meta device' in refused(AttachError, mixed, sgd(model), "bsp")
    assert "did you mean" in refused(StrategyError, model, sgd(model), "bps").lower()


def test_a_model_with_nothing_to_train() -> None:
    model = mlp()
    optimizer = sgd(model)
    model.requires_grad_(False)
    assert "no trainable parameter" in refused(AttachError, model, optimizer, "bsp")
    assert "no trainable parameter" in refused(AttachError, nn.ReLU(), optimizer, "bsp")


def test_a_transport_and_a_process_group_at_once() -> None:
    model = mlp()
    transport = laconic.InProcessCluster(1).transport(0)
    message = refused(AttachError, model, sgd(model), "bsp", transport=transport, process_group=object())
    assert "not both" in message
    assert "timeout_s has no effect" in refused(AttachError, model, sgd(model), "bsp", transport=transport, timeout_s=1)


def test_a_transport_carries_one_session_at_a_time() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        first, second = mlp(), mlp()
        with laconic.attach(first, sgd(first), "bsp", transport=transport):
            message = refused(AttachError, second, sgd(second), "bsp", transport=transport)
            assert "already carries a session" in message
        laconic.attach(second, sgd(second), "bsp", transport=transport).detach()

    laconic.InProcessCluster(2).run(one_rank)


@pytest.mark.parametrize("strategy", ["bsp", "local_sgd(period=2)", "bsp / gossip", "asp / gossip"])
def test_attaching_twice(strategy: str) -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, strategy, transport=transport):
            assert "optimizer is already attached" in refused(
                AttachError, model, optimizer, strategy, transport=transport
            )
            assert "model is already attached" in refused(AttachError, model, sgd(model), strategy, transport=transport)
        laconic.attach(model, optimizer, strategy, transport=transport).detach()

    laconic.InProcessCluster(2).run(one_rank)


def test_a_world_of_one_works_and_communicates_nothing() -> None:
    alone, attached = mlp(), mlp()
    for model, strategy in ((alone, None), (attached, "bsp / all_reduce / fp16 + error_feedback / wfbp")):
        optimizer = sgd(model)
        transport = laconic.InProcessCluster(1).transport(0)
        session = laconic.attach(model, optimizer, strategy, transport=transport) if strategy else None
        for step in range(3):
            mlp_loss(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            assert session.step == 3
            assert session.traffic.sent_bytes() == 0
            assert session.predicted_bytes_per_step() == 0
            session.load_state_dict(session.state_dict())
            session.detach()
            session.detach()
    assert all(torch.equal(value, snapshot(attached)[name]) for name, value in snapshot(alone).items())


def test_a_real_process_group_of_one(tmp_path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "ddp-fp16") as session:
            mlp_loss(model, 0, 0).backward()
            optimizer.step()
            assert session.world_size == 1
            assert session.traffic.sent_bytes() == 0
    finally:
        dist.destroy_process_group()


def test_parameters_and_buffers_start_equal() -> None:
    replicas = []
    for seed in range(3):
        torch.manual_seed(seed)
        replicas.append(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        replicas[-1][1].running_mean.fill_(seed)
        replicas[-1][0].bias.requires_grad_(False)

    def one_rank(transport: InProcessTransport) -> None:
        model = replicas[transport.rank]
        with laconic.attach(model, sgd(model), "bsp", transport=transport):
            pass

    expected = snapshot(replicas[0])
    laconic.InProcessCluster(3).run(one_rank)
    for replica in replicas:
        assert all(torch.equal(value, expected[name]) for name, value in snapshot(replica).items())


def test_no_thread_is_left_behind() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        with laconic.attach(model, sgd(model), "bsp", transport=transport):
            mlp_loss(model, 0, transport.rank).backward()

    laconic.InProcessCluster(2).run(one_rank)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("laconic")]


def test_a_replica_that_raises_releases_the_others() -> None:
    messages: dict[int, str] = {}

    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        try:
            with laconic.attach(model, optimizer, "bsp", transport=transport):
                for step in range(5):
                    if transport.rank == 1 and step == 2:
                        raise RuntimeError("out of coffee")
                    mlp_loss(model, step, transport.rank).backward()
                    optimizer.step()
        except PeerLost as exc:
            messages[transport.rank] = str(exc)
            raise

    with pytest.raises(RuntimeError, match="out of coffee"):
        laconic.InProcessCluster(3, timeout_s=20).run(one_rank)
    assert set(messages) == {0, 2}
    assert all("rank 1 raised RuntimeError: out of coffee" in message for message in messages.values())


def test_an_attached_model_can_be_saved_whole() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with laconic.attach(model, sgd(model), "bsp", transport=transport):
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            loaded(torch.zeros(2, 3))

    laconic.InProcessCluster(2).run(one_rank)


def test_a_failure_on_the_communication_thread_reaches_the_other_ranks_at_once() -> None:
    class BrokenLog(laconic.EventList):
        def write(self, event: laconic.Event) -> None:
            if event.kind == "exchange":
                raise OSError("disk full")

    messages: dict[int, str] = {}

    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        session = laconic.attach(
            model, optimizer, "bsp", transport=transport, events=BrokenLog() if transport.rank == 1 else None
        )
        try:
            for step in range(3):  # plain calls: no with block that could tell the others
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
        except (OSError, PeerLost) as exc:
            messages[transport.rank] = str(exc)
        with contextlib.suppress(OSError, PeerLost):
            session.detach()

    laconic.InProcessCluster(2, timeout_s=60).run(one_rank)
    assert messages[1] == "disk full"
    assert "rank 1 raised OSError while communicating: disk full" in messages[0]


def test_events_say_what_happened(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    with laconic.EventLog(path) as log:

        def one_rank(transport: InProcessTransport) -> None:
            model = mlp()
            optimizer = sgd(model)
            with laconic.attach(model, optimizer, "bsp / all_reduce / none / wfbp", transport=transport, events=log):
                for step in range(2):
                    mlp_loss(model, step, transport.rank).backward()
                    optimizer.step()

        laconic.InProcessCluster(2).run(one_rank)
    events = [laconic.Event.from_json(line) for line in path.read_text().splitlines()]
    assert {event.rank for event in events} == {0, 1}
    kinds = [event.kind for event in events if event.rank == 1]
    assert kinds.count("attach") == 1
    assert kinds.count("step") == 2
    assert kinds.count("wait") == 2
    exchanges = [event for event in events if event.kind == "exchange" and event.rank == 1]
    assert [event.data["bucket"] for event in exchanges] == [0, 1, 2, 3] * 2
    assert sum(int(event.data["wire_bytes"]) for event in exchanges[:4]) == 4 * sum(
        p.numel() for p in mlp().parameters()
    )
    assert all(event.duration_s >= 0 for event in events)


def test_init_sync_false_is_a_promise_that_is_checked() -> None:
    original = mlp()  # here, because threads share torch's random numbers

    def one_rank(transport: InProcessTransport, *, spoil: bool) -> None:
        model = copy.deepcopy(original)
        if spoil and transport.rank == 1:
            with torch.no_grad():
                model[2].bias[1] += 1
        with laconic.attach(model, sgd(model), "bsp", transport=transport, init_sync=False):
            assert transport.traffic.sent_bytes("control") < 10_000

    laconic.InProcessCluster(2).run(functools.partial(one_rank, spoil=False))
    with pytest.raises(AttachError, match=r'"2\.bias" is not the same on rank 0 and rank 1'):
        laconic.InProcessCluster(2).run(functools.partial(one_rank, spoil=True))


def test_all_ranks_must_promise_the_same() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        laconic.attach(model, sgd(model), "bsp", transport=transport, init_sync=transport.rank == 0)

    with pytest.raises(AttachError, match="init_sync is True on rank 0 and False on rank 1"):
        laconic.InProcessCluster(2).run(one_rank)
