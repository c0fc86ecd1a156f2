"""Models that break naive gradient averaging, each against the average computed by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CommunicationError, UnsupportedGradient
from tests.runtime.awkward import SCHEDULES, Convolutions, every_schedule, strategy
from tests.runtime.replicas import assert_equal, data, loop, mlp, reference, sgd, snapshot, train


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.embedding(tokens))
        return self.head(self.middle(torch.tanh(self.frozen(hidden))))  # middle is used twice


def tied_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(tokens).square().mean()


@every_schedule
def test_tied_frozen_and_twice_used_parameters(schedule: str) -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [model.embedding.weight], "lr": 0.05}, {"params": model.middle.parameters()}], lr=0.1
        )

    states = train(Tied(), strategy(schedule), loss=tied_loss, make_optimizer=two_groups)
    expected = reference(Tied(), loss=tied_loss, make_optimizer=two_groups)
    for state in states:
        assert_equal(state, expected)
    assert_equal({"w": states[0]["frozen.weight"]}, {"w": Tied().frozen.weight})


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_buffers_follow_rank_0_and_strides_are_kept(memory_format) -> None:
    def make() -> nn.Module:
        return Convolutions().to(memory_format=memory_format)

    def body(model, optimizer, session, rank):
        for step in range(3):
            model(data(step, rank, 4, 1, 8, 8)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad.stride() == parameter.stride()
            optimizer.step()
            optimizer.zero_grad()
        assert session.traffic.sent_bytes("buffers") == (3 * sum(b.nbytes for b in model.buffers()) if rank == 0 else 0)

    states = loop(body, model=make)
    assert_equal(*states)
    assert int(states[0]["layers.1.num_batches_tracked"]) == 3


def test_several_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(5, 4)
            self.b = nn.Linear(4, 4).double()
            self.c = nn.Linear(4, 3).bfloat16()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.c(self.b(self.a(inputs).double()).bfloat16()).float()
            return (hidden * self.phase).abs()

    def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    for schedule in SCHEDULES:
        states = train(Mixed(), strategy(schedule), make_optimizer=plain_sgd)
        assert_equal(states[0], reference(Mixed(), make_optimizer=plain_sgd))
    with pytest.raises(UnsupportedGradient, match=r'fp16 cannot carry parameter "phase" of torch\.complex64'):
        train(Mixed(), "bsp / all_reduce / fp16", make_optimizer=plain_sgd)


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(UnsupportedGradient, match='layer "0" has sparse=True'):
        train(model)

    def sparse_later(model, step, rank):
        return nn.functional.embedding(torch.tensor([1, 2]), model.weight, sparse=True).sum()

    with pytest.raises(UnsupportedGradient, match='parameter "weight" has a sparse gradient'):
        train(nn.Linear(3, 5), loss=sparse_later)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = checkpoint(
                lambda value, layer=block: torch.tanh(layer(value)), hidden, use_reentrant=self.reentrant
            )
        return self.last(hidden)


@every_schedule
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(schedule: str, reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    states = train(model, strategy(schedule))
    assert_equal(states[0], reference(model))
    assert_equal(*states)


def test_a_whole_model_in_reentrant_checkpoints() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        inputs = data(step, rank, 4, 5).requires_grad_()
        return checkpoint(model, inputs, use_reentrant=True).square().mean()

    states = train(mlp(), loss=loss)
    assert_equal(states[0], reference(mlp(), loss=loss))


def test_a_parameter_shared_by_reentrant_checkpoints_is_right_or_refused() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        hidden = data(step, rank, 4, 5).requires_grad_()
        for _ in range(2):
            hidden = checkpoint(lambda value: model[0](value)[:, :5], hidden, use_reentrant=True)
        return model(hidden).square().mean()

    # Nothing leaves before the backward pass has ended, so the grown gradient is taken.
    states = train(mlp(), strategy("sequential"), loss=loss)
    assert_equal(states[0], reference(mlp(), loss=loss))
    with pytest.raises(CommunicationError, match="second gradient"):
        train(mlp(), strategy("wfbp"), loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_modules(in_place: bool) -> None:
    def prepare() -> tuple[nn.Module, nn.Module]:
        model = Convolutions()
        if in_place:
            model.compile(backend="aot_eager")
            return model, model
        return model, torch.compile(model, backend="aot_eager")

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 4, 1, 8, 8)).square().mean()

    replicas = [prepare() for _ in range(2)]
    for model, compiled in replicas:  # compiling is not thread-safe
        loss(compiled, 0, 0).backward()
        model.load_state_dict(Convolutions().state_dict())
        model.zero_grad()

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model, compiled = replicas[transport.rank]
        optimizer = sgd(model)
        with laconic.attach(compiled, optimizer, strategy("wfbp"), transport=transport) as session:
            for step in range(3):
                loss(compiled, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            names = {tensor.name for bucket in session.plan.buckets for tensor in bucket.tensors}
            assert names == {name for name, _ in model.named_parameters()}
        return snapshot(model)

    states = laconic.InProcessCluster(2, timeout_s=30).run(one_rank)
    assert_equal(*states)
    expected = train(Convolutions(), strategy("wfbp"), loss=loss, steps=3)[0]
    for name, value in states[0].items():
        torch.testing.assert_close(value, expected[name])


def test_an_attached_model_can_be_copied() -> None:
    def body(model, optimizer, session, rank):
        average = copy.deepcopy(model)
        model(data(0, rank, 4, 1, 8, 8)).square().mean().backward()
        optimizer.step()
        sent = session.traffic.sent_bytes()
        average(data(0, rank, 4, 1, 8, 8)).sum().backward()
        assert session.traffic.sent_bytes() == sent

    loop(body, model=Convolutions)


def test_many_buckets_in_flight() -> None:
    model = nn.Sequential(*[layer for _ in range(40) for layer in (nn.Linear(5, 5), nn.Tanh())])
    states = train(model, strategy("wfbp"), world_size=3)
    assert_equal(states[0], reference(model, world_size=3))


def test_a_model_changed_while_attached_is_named() -> None:
    def body(model, optimizer, session, rank):
        model.double()
        with pytest.raises(UnsupportedGradient, match=r"2\.bias.*float64.*attached as .*float32"):
            model(data(0, rank, 4, 5).double()).square().mean().backward()

    loop(body)


class StoredTransposed(nn.Module):
    """A wide layer whose weight lies in memory column by column."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(12, 5).t())
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs @ self.weight + self.bias)


@pytest.mark.parametrize(
    "how",
    [
        "bsp / all_reduce / powersgd(rank=1) + error_feedback",
        "bsp / parameter_server / powersgd(rank=1) + error_feedback",
        "bsp / all_reduce / acpsgd(rank=1) + error_feedback",
        "bsp / all_reduce / atomo(rank=1)",
        "dion(scale=spectral_norm) / all_reduce / powersgd(rank=1)",
    ],
)
@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
def test_low_rank_means_the_matrix_and_not_how_it_is_stored(how: str) -> None:
    def body(model, optimizer, session, rank):
        for step in range(3):
            model(data(step, rank, 4, 5)).square().mean().backward()
            lengths = torch.linalg.svdvals(model.weight.grad)
            # Atomo averages one factor pair of each rank.
            assert float(lengths[2 if "atomo" in how else 1]) < 1e-5 * float(lengths[0])
            if "dion" in how:
                torch.testing.assert_close(float(lengths[0]), (5 / 12) ** 0.5)
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(*loop(body, model=StoredTransposed, how=how, make_optimizer=lambda model: sgd(model, how)))
