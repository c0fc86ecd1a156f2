"""Another strategy takes over in a session: as if attached anew, and without losing what was still to be sent."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.core.stateful import CARRIED
from laconic.errors import AttachError, CommunicationError
from laconic.runtime.change import why_not_changed
from laconic.strategy import COMPRESSORS, Strategy
from tests.processes import run_processes
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, sgd, snapshot

DDP = "bsp / all_reduce / none / fusion"
TOPK = "bsp / all_reduce / topk(density=0.1) + error_feedback / fusion(bytes=100)"
INT8 = "bsp / all_reduce / int8 + error_feedback / fusion"
LOCAL = "local_sgd(period=4) / all_reduce / none"
LOCAL_TOPK = "local_sgd(period=2) / all_reduce / topk(density=0.1) + error_feedback"
DECOUPLED = "decoupled_momentum(period=2, lr=1, beta=0.999) / all_reduce / dct_topk"


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for step in numbers:
        mlp_loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("first", "second"), [(DDP, TOPK), (DDP, "bsp / all_reduce / none / dear"), ("dear", DDP)])
def test_equal_to_detaching_and_attaching_anew(first: str, second: str) -> None:
    original = mlp()  # here: ranks are threads, which share torch's generator

    def changed(transport: InProcessTransport) -> tuple[dict[str, torch.Tensor], int]:
        model = copy.deepcopy(original)
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, first, transport=transport) as session:
            steps(model, optimizer, transport.rank, range(4))
            session.change_strategy(second)
            assert str(session.strategy) == str(Strategy.parse(second))
            steps(model, optimizer, transport.rank, range(4, 9))
            assert session.step == 9
            session.settle()
            session.wait()
            before = session.traffic.sent_bytes()
            steps(model, optimizer, transport.rank, range(9, 10))
            session.settle()
            session.wait()
            assert session.traffic.sent_bytes() - before == session.predicted_bytes_per_step()
            session.settle()
            return snapshot(model), session.traffic.sent_bytes()

    def by_hand(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(original)
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, first, transport=transport):
            steps(model, optimizer, transport.rank, range(4))
        with laconic.attach(model, optimizer, second, transport=transport) as session:
            steps(model, optimizer, transport.rank, range(4, 10))
            session.settle()
        return snapshot(model)

    found, expected = (laconic.InProcessCluster(2, timeout_s=20).run(how) for how in (changed, by_hand))
    for rank in (0, 1):
        assert_equal(found[rank][0], expected[rank])
        assert_equal(found[rank][0], found[0][0])


class Line(nn.Module):
    """The gradient of its loss is the batch, whatever its weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))
        self.other = nn.Parameter(torch.zeros(3, 5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weight @ batch[:40] + (self.other * batch[40:].view(3, 5)).sum()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(55, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize(
    "course",
    [
        (TOPK, DDP),
        (TOPK, INT8, DDP),
        (DDP, TOPK, "bsp / all_reduce / none / dear", DDP),
        (LOCAL, DDP),
        (DDP, LOCAL_TOPK, LOCAL, DDP),
        ("delayed(period=2) / all_reduce / none", TOPK, DDP),
        (DECOUPLED, DDP, LOCAL_TOPK, DDP),
    ],
)
def test_what_was_held_back_arrives_under_the_next_strategy(course: tuple[str, ...]) -> None:
    """With gradients that do not depend on parameters, the last step of DDP leaves the sum of all mean gradients."""

    def one_rank(transport: InProcessTransport) -> torch.Tensor:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with laconic.attach(model, optimizer, course[0], transport=transport) as session:
            for number, strategy in enumerate(course):
                if number:
                    session.change_strategy(strategy)
                for step in range(3 * number, 3 * number + 3):
                    model(batch(step, transport.rank)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            session.settle()
        return torch.cat([model.weight.detach(), model.other.detach().flatten()])

    count = 3 * len(course)
    expected = -sum(batch(step, rank) for step in range(count) for rank in (0, 1)) / 2
    for found in laconic.InProcessCluster(2, timeout_s=20).run(one_rank):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_state_saved_between_change_and_step_holds_what_is_carried() -> None:
    def one_rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, TOPK, transport=transport) as session:
            steps(model, optimizer, transport.rank, range(3))
            owed = session.state_dict()["ranks"][str(transport.rank)]["0.weight"]["error_feedback.residual"]
            session.change_strategy(DDP)
            state = session.state_dict()
            carried = state["ranks"][str(transport.rank)]["0.weight"][CARRIED]
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            steps(model, optimizer, transport.rank, range(3, 5))
            after = snapshot(model)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        with laconic.attach(model, optimizer, DDP, transport=transport) as session:
            session.load_state_dict(state)
            steps(model, optimizer, transport.rank, range(3, 5))
            assert_equal(snapshot(model), after)
        return owed, carried

    for owed, carried in laconic.InProcessCluster(2, timeout_s=20).run(one_rank):
        assert owed.any()
        assert torch.equal(owed, carried)


def test_what_cannot_take_over_is_refused_and_nothing_has_changed() -> None:
    def one_rank(transport: InProcessTransport) -> list[str]:
        model, said = mlp(), list[str]()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, DDP, transport=transport) as session:
            steps(model, optimizer, transport.rank, range(2))
            for strategy in (
                "demo / all_reduce / dct_topk",
                "bsp / parameter_server",
                "bsp / all_reduce / int8 + ef21",
                "local_sgd / gossip / none",
                "asp / gossip / none",
            ):
                with pytest.raises(AttachError) as refused:
                    session.change_strategy(strategy)
                said.append(str(refused.value))
                assert session.why_not_changed_to(strategy) == said[-1]
            with pytest.raises(CommunicationError, match="different strategies"):
                session.change_strategy(DDP if transport.rank else TOPK)
            assert str(session.strategy) == DDP
            steps(model, optimizer, transport.rank, range(2, 4))
            session.change_strategy(TOPK)
            said.append(session.why_not_changed_to(LOCAL))
            steps(model, optimizer, transport.rank, range(4, 5))
            session.change_strategy(DDP)
            said.append(session.why_not_changed_to(LOCAL))
            steps(model, optimizer, transport.rank, range(5, 6))
            session.change_strategy(LOCAL)
        return said

    for said in laconic.InProcessCluster(2, timeout_s=20).run(one_rank):
        assert "takes the place of the optimizer's momentum" in said[0]
        assert "elsewhere" in said[1]
        assert "no other strategy can take over" in said[2]
        assert "no step after which all replicas have heard" in said[3]
        assert "no step after which all replicas have heard" in said[4]
        assert "its next step sends them" in said[5], "the residual"
        assert "its next step sends them" in said[6], "what DDP has taken over and not sent yet"


def test_where_replicas_train_alone_a_grad_scaler_keeps_the_strategy() -> None:
    def one_rank(transport: InProcessTransport, first: str, second: str) -> None:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, first, transport=transport) as session:
            scaler.scale(mlp_loss(model, 0, transport.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
            with pytest.raises(AttachError, match="its scale differs between ranks"):
                session.change_strategy(second)

    for first, second in ((DDP, LOCAL), (LOCAL, DDP)):
        laconic.InProcessCluster(2, timeout_s=20).run(lambda transport, a=first, b=second: one_rank(transport, a, b))


def test_a_change_that_fails_on_its_way_leaves_nothing_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        session = laconic.attach(model, optimizer, DDP, transport=transport)
        steps(model, optimizer, transport.rank, range(1))
        with pytest.raises(RuntimeError, match="half-way"):
            session.change_strategy(TOPK)
        assert not optimizer._optimizer_step_pre_hooks
        assert not model._forward_pre_hooks
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    def fails(*_: object) -> None:
        raise RuntimeError("half-way")

    monkeypatch.setattr("laconic.runtime.change.settle", fails)
    laconic.InProcessCluster(2, timeout_s=20).run(one_rank)


def test_every_compressor_says_what_it_owes_or_cannot_be_left() -> None:
    """A field that counts as a sum over ranks must not be forgotten by a change."""
    for method in COMPRESSORS:
        kept = {field for field, resize in method.on_resize.items() if resize == "sum"} - method.owed_fields
        if kept and not issubclass(method, laconic.Wrapper):
            assert why_not_changed(Strategy(compression=method())), f"{method.name} would lose {kept}"


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_replicas_that_trained_alone_are_one_model_again_with_one_optimizer() -> None:
    """AdamW alone, and Muon with AdamW; at once after the change, and after more steps of DDP."""
    ranks = run_processes("tests.runtime.change_ranks:there_and_back", world_size=2, timeout_s=110)
    first = ranks[0].value
    for value in (rank.value for rank in ranks):
        for optimizer in ("adamw", "muon"):
            assert_equal(value[optimizer]["returned"], first[optimizer]["returned"])
            assert_equal(value[optimizer]["later"], first[optimizer]["later"])
    for optimizer in ("adamw", "muon"):
        alone = [rank.value[optimizer]["alone"] for rank in ranks]
        assert not torch.equal(alone[0]["0.weight"], alone[1]["0.weight"]), "between rounds they differ"
        moments = [key for key in first[optimizer]["returned"] if "exp_avg" in key or "momentum_buffer" in key]
        assert moments, "the optimizer's state is among what was compared"


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_rank_that_dies_in_the_forward_pass_after_a_change_is_named() -> None:
    ranks = run_processes("tests.runtime.change_ranks:dies_after_change", world_size=2, timeout_s=110, may_fail=True)
    assert ranks[1].exit_code == 9
    assert ranks[0].exit_code == 0
    for said, took_s in ranks[0].value:
        assert "rank 1" in said
        assert took_s < 20, "long before the limit of 60 s"
