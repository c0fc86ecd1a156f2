"""What servers and neighbours remember can be saved, put back, and handed over."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from tests.runtime.replicas import assert_equal, mlp, sgd, snapshot
from tests.runtime.servers.one_worker import alone, close, steps


@pytest.mark.parametrize(
    "strategy",
    [
        "asp / parameter_server",
        "backup",
        "ssp(staleness=0) / parameter_server / topk(0.5) + error_feedback",
        "bsp / parameter_server / topk(0.5) + error_feedback",
        "asp / gossip",
        "asp / choco / topk(0.5)",
    ],
)
def test_a_saved_state_is_continued(strategy: str) -> None:
    saved: dict[int, dict] = {}
    models: dict[int, dict[str, torch.Tensor]] = {}

    def save(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            steps(model, optimizer, 3, rank=transport.rank)
            saved[transport.rank] = copy.deepcopy(session.state_dict())
            models[transport.rank] = snapshot(model)

    def load(transport: InProcessTransport) -> tuple[dict, dict[str, torch.Tensor]]:
        model = mlp()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            model.load_state_dict(models[transport.rank])
            session.load_state_dict(saved[transport.rank])
            assert session.step == 3
            return copy.deepcopy(session.state_dict()), snapshot(model)

    laconic.InProcessCluster(2, timeout_s=10).run(save)
    for rank, (state, model) in enumerate(laconic.InProcessCluster(2, timeout_s=10).run(load)):
        assert_equal(model, models[rank])
        mine, then = state["ranks"][str(rank)], saved[rank]["ranks"][str(rank)]
        assert mine.keys() == then.keys()
        for name in mine:
            assert_equal(mine[name], then[name])
    fields = {field for fields in saved[0]["ranks"]["0"].values() for field in fields}
    if "choco" in strategy:
        assert fields == {"choco.own|1", "choco.theirs|1"}
    elif "gossip" not in strategy:
        optimizer = {"server.step|0", "server.exp_avg|1", "server.exp_avg|2", "server.exp_avg_sq|1"}
        assert ("bsp" in strategy) or optimizer <= fields
        assert ("topk" not in strategy) or "error_feedback.residual" in fields
        assert ("bsp" not in strategy) or "server.error_feedback.residual|1" in fields


def test_the_next_steps_after_loading_are_bit_identical() -> None:
    strategy = "asp / parameter_server / topk(0.5) + error_feedback"

    def one(transport: InProcessTransport) -> list[dict[str, torch.Tensor]]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            steps(model, optimizer, 3)
            saved = copy.deepcopy(session.state_dict()), snapshot(model)
            steps(model, optimizer, 3, first=3)
            uninterrupted = snapshot(model)
            model.load_state_dict(saved[1])
            session.load_state_dict(saved[0])
            steps(model, optimizer, 3, first=3)
        return [uninterrupted, snapshot(model)]

    assert_equal(*laconic.InProcessCluster(1, timeout_s=10).run(one)[0])


def test_what_the_optimizer_remembers_goes_to_servers_and_comes_back() -> None:
    plain = mlp()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    steps(plain, theirs, 9)

    def run(model: nn.Module, attach) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps(model, optimizer, 3)
        with attach(optimizer):
            steps(model, optimizer, 3, first=3)
        steps(model, optimizer, 3, first=6)
        for mine, usual in zip(model.parameters(), plain.parameters(), strict=True):
            close(optimizer.state[mine], theirs.state[usual])

    close(alone(run), snapshot(plain))


def test_servers_are_told_of_other_buckets_and_lose_nothing() -> None:
    strategy = "bsp / parameter_server / topk(0.5) + error_feedback / priority(partition_bytes=1KiB)"

    def one(transport: InProcessTransport) -> tuple[dict, dict, int]:
        model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 3))
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            steps(model, optimizer, 4, rank=transport.rank)
            saved, then = copy.deepcopy(session.state_dict()), snapshot(model)
            steps(model, optimizer, 2, first=4, rank=transport.rank)
            snapshot(model)  # makes the updates that wait, which would otherwise change what is loaded
            model.load_state_dict(then)
            session.load_state_dict(saved)
            again = copy.deepcopy(session.state_dict())
            return saved["ranks"][str(transport.rank)], again["ranks"][str(transport.rank)], len(session.plan.buckets)

    for rank, (saved, again, num_buckets) in enumerate(laconic.InProcessCluster(2, timeout_s=10).run(one)):
        assert num_buckets > 4, "parameters are cut into pieces"
        assert saved.keys() == again.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for name, fields in saved.items():
            assert_equal(fields, again[name])
            owed = fields.get("server.error_feedback.residual|1")
            assert (owed is None) == (rank == 1)
            assert owed is None or owed.numel() == fields["error_feedback.residual"].numel()
            assert owed is None or "bias" in name or bool(owed.any())
