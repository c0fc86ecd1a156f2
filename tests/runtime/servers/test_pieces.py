"""A tensor that several servers share: the same training, the same bytes, saved as one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from tests.runtime.replicas import assert_equal, data, reference, sgd, snapshot, train

pytestmark = pytest.mark.timeout(60)


def wide() -> nn.Module:
    """Of 480 KB; nearly all of it is one weight."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10, bias=False), nn.Tanh(), nn.Linear(10, 12_000, bias=False))


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(data(step, rank, 4, 8)).square().mean()


@pytest.mark.parametrize("schedule", ["sequential", "fusion", "wfbp", "priority(partition_bytes=200KB)", "dear"])
def test_training_is_as_with_one_server(schedule: str) -> None:
    strategy = f"bsp / parameter_server / none / {schedule}"
    states = train(wide(), strategy, loss=loss, world_size=3)
    for state in states[1:]:
        assert_equal(states[0], state)
    for name, value in reference(wide(), loss=loss, world_size=3).items():
        assert torch.allclose(states[0][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("compression", ["topk(density=5%) + error_feedback", "int8 + error_feedback"])
def test_what_is_kept_for_pieces_is_saved_with_the_parameter(compression: str) -> None:
    def one_rank(transport: InProcessTransport) -> None:
        def attached(replica: nn.Module):
            optimizer = sgd(replica)
            text = f"bsp / parameter_server / {compression}"
            return optimizer, laconic.attach(replica, optimizer, text, transport=transport)

        def step(replica: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            loss(replica, number, transport.rank).backward()
            optimizer.step()
            optimizer.zero_grad()

        first = wide()
        optimizer, session = attached(first)
        with session:
            pieces = [tensor.part_of for bucket in session.plan.buckets for tensor in bucket.tensors]
            assert pieces.count("2.weight") >= 3
            for number in range(3):
                before = session.traffic.sent_bytes("payload")
                step(first, optimizer, number)
                session.wait()
                assert session.traffic.sent_bytes("payload") - before == session.predicted_bytes_per_step()
            saved = [copy.deepcopy(part.state_dict()) for part in (first, optimizer, session)]
            assert set(saved[2]["ranks"][str(transport.rank)]) == {name for name, _ in first.named_parameters()}
            for number in range(3, 6):
                step(first, optimizer, number)
        second = wide()
        optimizer, session = attached(second)
        with session:
            for part, state in zip((second, optimizer, session), saved, strict=True):
                part.load_state_dict(state)
            for number in range(3, 6):
                step(second, optimizer, number)
        assert_equal(snapshot(first), snapshot(second))

    laconic.InProcessCluster(3, timeout_s=20).run(one_rank)
