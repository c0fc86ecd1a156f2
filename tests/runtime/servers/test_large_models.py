"""Models with more tensors, and more bytes, than one message to a server may carry."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

import laconic
from laconic.core.caller import Caller
from laconic.core.in_process import InProcessTransport
from laconic.core.listener import Listener
from laconic.errors import FrameRefused
from laconic.runtime.servers import child_process, client
from tests.runtime.replicas import assert_equal, snapshot

pytestmark = pytest.mark.timeout(60)
NUM_LAYERS = 520


def many() -> nn.Module:
    """1,040 tensors of one value each."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(1, 1) for _ in range(NUM_LAYERS)])


def many_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        torch.stack([layer(torch.full((1, 1), 0.1 * step + 1)) for layer in model]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["asp", "bsp"])
@pytest.mark.parametrize("schedule", ["wfbp", "sequential"])
def test_more_than_a_thousand_tensors_on_one_server(strategy: str, schedule: str) -> None:
    """As many buckets as tensors, and all tensors in one bucket."""
    compression = "none" if strategy == "asp" else "topk(0.5) + error_feedback"

    def one(transport: InProcessTransport) -> None:
        model = many()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        text = f"{strategy} / parameter_server(shards=1) / {compression} / {schedule}"
        with laconic.attach(model, optimizer, text, transport=transport) as session:
            many_steps(model, optimizer, 1)
            saved, values = copy.deepcopy(session.state_dict()), snapshot(model)
            session.load_state_dict(saved)
            again = session.state_dict()["ranks"][str(transport.rank)]
            assert_equal(snapshot(model), values)
            assert len(again) == 2 * NUM_LAYERS
            for name, fields in saved["ranks"][str(transport.rank)].items():
                assert_equal(again[name], fields)
        if strategy == "asp":
            assert all(optimizer.state[parameter]["step"] == 1 for parameter in model.parameters())

    laconic.InProcessCluster(1 if strategy == "asp" else 2, timeout_s=20).run(one)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """A limit of frames below the size of the model."""
    limit_bytes = 4500
    monkeypatch.setattr(client, "Caller", partial(Caller, limit_bytes=limit_bytes))
    monkeypatch.setattr(child_process, "Listener", partial(Listener, limit_bytes=limit_bytes))
    return limit_bytes


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def test_a_server_may_hold_more_bytes_than_a_frame_may(small_limit: int) -> None:
    def one(transport: InProcessTransport) -> None:
        model = wide()
        held_bytes = sum(parameter.nbytes for parameter in model.parameters())
        assert held_bytes > small_limit
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        strategy = "asp / parameter_server(shards=1) / none / wfbp"
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(2):
                model(torch.full((2, 16), 0.1 * step + 1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            saved, values = copy.deepcopy(session.state_dict()), snapshot(model)
            session.load_state_dict(saved)
            assert_equal(snapshot(model), values)

    laconic.InProcessCluster(1, timeout_s=20).run(one)


def test_a_bucket_over_the_limit_is_named(small_limit: int) -> None:
    def one(transport: InProcessTransport) -> None:
        model = wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        laconic.attach(model, optimizer, "asp / parameter_server(shards=1) / none / sequential", transport=transport)

    message = "restoring bucket 0 on rank 0 cannot be sent to server 0 .* at most 4500 bytes, got 6"
    with pytest.raises(FrameRefused, match=message):
        laconic.InProcessCluster(1, timeout_s=20).run(one)
