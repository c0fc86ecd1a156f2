"""Models and loops that break naive gradient averaging, each against the average computed by hand."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import AttachError, CommunicationError, UnsupportedGradient
from tests.runtime.replicas import assert_equal, data, mlp, mlp_loss, reference, sgd, snapshot, train

SCHEDULES = ["sequential", "wfbp", "fusion", "fusion(100B, 50B)"]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def strategy(schedule: str) -> str:
    return f"bsp / all_reduce / none / {schedule}"


class Branches(nn.Module):
    """Three branches of which a forward pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor, branches: str) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        used = {"l": self.left, "r": self.right}
        return sum((used[name](hidden) for name in branches), torch.zeros(4, 3) + hidden.sum())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Decay and momentum tell "no gradient" from "a gradient of zero".
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


@every_schedule
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_parameters_unused_in_some_steps_and_on_some_ranks(schedule: str, make_optimizer) -> None:
    # Step by step, what ranks 0, 1 and 2 use: everything, unlike parts, nothing of one branch anywhere.
    pattern = [("lr", "lr", "lr"), ("l", "r", "lr"), ("l", "l", "l"), ("", "r", ""), ("", "", ""), ("lr", "", "lr")]

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 4, 5), pattern[step][rank]).square().mean()

    arguments = {"loss": loss, "make_optimizer": make_optimizer, "world_size": 3, "steps": len(pattern)}
    states = train(Branches(), strategy(schedule), **arguments)
    expected = reference(Branches(), **arguments)
    for state in states:
        assert_equal(state, expected)


def test_unused_parameters_first_seen_in_the_first_step() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 4, 5), "l" if rank == 0 else "r").square().mean()

    states = train(Branches(), loss=loss)
    assert_equal(states[0], reference(Branches(), loss=loss))
    assert_equal(states[0], states[1])


def test_a_gradient_that_is_zero_is_not_taken_for_a_missing_one() -> None:
    # right's gradient is exactly zero, yet it is used: weight decay must act on it.
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        hidden = model.trunk(data(step, rank, 4, 5))
        return (model.left(hidden) + 0.0 * model.right(hidden)).square().mean()

    states = train(Branches(), loss=loss, make_optimizer=adamw)
    assert_equal(states[0], reference(Branches(), loss=loss, make_optimizer=adamw))


def test_asking_who_used_what_costs_control_bytes_only_when_it_matters() -> None:
    def one_rank(transport: InProcessTransport) -> list[int]:
        model = Branches()
        optimizer = sgd(model)
        costs = []
        with laconic.attach(model, optimizer, "bsp", transport=transport) as session:
            model.never.requires_grad_(False)
            for step, used in enumerate(["lr", "lr", "l"]):
                before = session.traffic.sent_bytes("control")
                (model(data(step, transport.rank, 4, 5), used).square().mean() + model.never.weight.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                costs.append(session.traffic.sent_bytes("control") - before)
        return costs

    # `never` is frozen after attaching, so it gets no gradient: one byte per parameter is exchanged in every step.
    num_parameters = len(list(Branches().parameters()))
    costs = laconic.InProcessCluster(2).run(one_rank)[0]
    assert costs[1:] == [num_parameters, num_parameters]

    def whole_model(transport: InProcessTransport) -> list[int]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "bsp", transport=transport) as session:
            costs = []
            for step in range(3):
                before = session.traffic.sent_bytes("control")
                mlp_loss(model, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                costs.append(session.traffic.sent_bytes("control") - before)
        return costs

    assert laconic.InProcessCluster(2).run(whole_model)[0][1:] == [0, 0]


def test_a_broken_promise_that_all_parameters_are_used_is_named() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 4, 5), "l").square().mean()

    with pytest.raises(CommunicationError, match=r"right\.weight.*find_unused_parameters=True"):
        train(Branches(), loss=loss, find_unused_parameters=False)
    train(mlp(), find_unused_parameters=False)


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


def _loop(body, *, model=mlp, how="bsp", world_size=2, make_optimizer=sgd):
    """Run `body(model, optimizer, session, rank)` on every rank; the states at the end."""

    original = model()  # once: seeding and drawing in several threads would interleave

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = copy.deepcopy(original)
        optimizer = make_optimizer(replica)
        with laconic.attach(replica, optimizer, how, transport=transport) as session:
            body(replica, optimizer, session, transport.rank)
        return snapshot(replica)

    return laconic.InProcessCluster(world_size, timeout_s=10).run(one_rank)


@every_schedule
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(schedule: str, set_to_none: bool) -> None:
    def body(model, optimizer, session, rank):
        for step in range(3):
            with session.accumulate():
                (mlp_loss(model, 10 * step, rank) / 2).backward()
            sent = session.traffic.sent_bytes("payload")
            assert sent == session.predicted_bytes_per_step() * step
            (mlp_loss(model, 10 * step + 1, rank) / 2).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    def loss(model, step, rank):
        return (mlp_loss(model, 10 * step, rank) + mlp_loss(model, 10 * step + 1, rank)) / 2

    states = _loop(body, how=strategy(schedule))
    expected = reference(mlp(), loss=loss, steps=3)
    for name, value in states[0].items():
        torch.testing.assert_close(value, expected[name])
    assert_equal(*states)


def test_a_parameter_used_only_while_accumulating() -> None:
    def body(model, optimizer, session, rank):
        with session.accumulate():
            model(data(0, rank, 4, 5), "l").square().mean().backward()
        model(data(1, rank, 4, 5), "r").square().mean().backward()
        optimizer.step()

    def loss(model, step, rank):
        return model(data(0, rank, 4, 5), "l").square().mean() + model(data(1, rank, 4, 5), "r").square().mean()

    states = _loop(body, model=Branches)
    expected = reference(Branches(), loss=loss, steps=1)
    for name, value in states[0].items():
        torch.testing.assert_close(value, expected[name])
    assert_equal(*states)


def test_gradients_that_are_never_zeroed_and_two_backward_passes_per_step() -> None:
    def body(model, optimizer, session, rank):
        for step in range(3):
            mlp_loss(model, 2 * step, rank).backward()
            mlp_loss(model, 2 * step + 1, rank).backward()
            optimizer.step()

    states = _loop(body)
    model = mlp()
    optimizer = sgd(model)
    for step in range(3):
        for part in (2 * step, 2 * step + 1):
            (sum(mlp_loss(model, part, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
    for name, value in snapshot(model).items():
        torch.testing.assert_close(states[0][name], value)
    assert_equal(*states)


def test_clipping_sees_the_averaged_gradient() -> None:
    norms: dict[int, list[float]] = {0: [], 1: []}

    def body(model, optimizer, session, rank):
        for step in range(3):
            mlp_loss(model, step, rank).backward()
            norms[rank].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
            optimizer.zero_grad()

    states = _loop(body)
    assert norms[0] == norms[1]
    assert_equal(*states)


def test_grad_scaler_and_autocast() -> None:
    def body(model, optimizer, session, rank):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=2)
        scales = []
        for step in range(8):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mlp_loss(model, step, rank) * (1e30 if step == 3 and rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert scales[3] < scales[2], "an overflow on one rank must be seen by all"
        assert session.step == 7, "a skipped step is not a step"

    assert_equal(*_loop(body))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


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

    states = _loop(body, model=make)
    assert_equal(*states)
    assert int(states[0]["layers.1.num_batches_tracked"]) == 3


def test_evaluation_does_not_communicate() -> None:
    def body(model, optimizer, session, rank):
        model(data(0, rank, 4, 1, 8, 8)).square().mean().backward()
        optimizer.step()
        sent = session.traffic.sent_bytes()
        if rank == 0:  # on one rank alone: any communication would hang here
            model.eval()
            with torch.no_grad():
                model(data(5, 0, 4, 1, 8, 8))
            model.train()
            with torch.no_grad():
                model(data(5, 0, 4, 1, 8, 8))
        assert session.traffic.sent_bytes() == sent

    _loop(body, model=Convolutions)


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


def test_differentiable_gradients_are_refused() -> None:
    def body(model, optimizer, session, rank):
        mlp_loss(model, 0, rank).backward(create_graph=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedGradient, match="create_graph"):
            _loop(body)


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


def test_an_optimizer_that_trains_something_else_is_refused() -> None:
    other = nn.Linear(2, 2)

    def both(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)

    with pytest.raises(AttachError, match=r"shape \(2, 2\).*ModuleList"):
        train(mlp(), make_optimizer=both)

    def body(model, optimizer, session, rank):
        mlp_loss(model, 0, rank).backward()
        optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
        optimizer.step()

    with pytest.raises(AttachError, match=r"optimizer group 1 trains a parameter of shape \(2, 2\)"):
        _loop(body)


def test_an_interrupted_backward_pass_is_reported() -> None:
    class Interrupt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("interrupted on purpose")

    def body(model, optimizer, session, rank):
        with pytest.raises(ValueError, match="on purpose"):
            model[2](Interrupt.apply(model[0](data(0, rank, 4, 5)))).sum().backward()
        with pytest.raises(CommunicationError, match="has not exchanged all gradients"):
            optimizer.step()
        with pytest.raises(CommunicationError, match="second gradient"):
            mlp_loss(model, 0, rank).backward()

    _loop(body, how=strategy("wfbp"))


def test_an_attached_model_can_be_copied() -> None:
    def body(model, optimizer, session, rank):
        average = copy.deepcopy(model)
        model(data(0, rank, 4, 1, 8, 8)).square().mean().backward()
        optimizer.step()
        sent = session.traffic.sent_bytes()
        average(data(0, rank, 4, 1, 8, 8)).sum().backward()
        assert session.traffic.sent_bytes() == sent

    _loop(body, model=Convolutions)


def test_many_buckets_in_flight() -> None:
    model = nn.Sequential(*[layer for _ in range(40) for layer in (nn.Linear(5, 5), nn.Tanh())])
    states = train(model, strategy("wfbp"), world_size=3)
    assert_equal(states[0], reference(model, world_size=3))


def test_what_was_never_exchanged_is_never_applied() -> None:
    def unfrozen_later(model, optimizer, session, rank):
        model[0].requires_grad_(True)
        mlp_loss(model, 0, rank).backward()
        with pytest.raises(AttachError, match="unfreezing"):
            optimizer.step()

    def frozen_first() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    _loop(unfrozen_later, model=frozen_first)

    def only_accumulated(model, optimizer, session, rank):
        with session.accumulate():
            mlp_loss(model, 0, rank).backward()
        with pytest.raises(CommunicationError, match="only accumulated"):
            optimizer.step()

    _loop(only_accumulated)

    def set_by_hand(model, optimizer, session, rank):
        gradients = torch.autograd.grad(mlp_loss(model, 0, rank), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        with pytest.raises(CommunicationError, match="never exchanged"):
            optimizer.step()

    _loop(set_by_hand)


def test_steps_without_a_pass_and_two_steps_after_one() -> None:
    def body(model, optimizer, session, rank):
        optimizer.step()  # some schedules of learning rates begin like this
        for step in range(2):
            mlp_loss(model, step, rank).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(*_loop(body))


def test_a_rank_whose_loss_touches_no_parameter_takes_part_with_nothing() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor | None:
        return None if (step, rank) in ((0, 0), (2, 1)) else mlp_loss(model, step, rank)

    for schedule in SCHEDULES:
        states = train(mlp(), strategy(schedule), loss=loss, steps=4)
        assert_equal(states[0], reference(mlp(), loss=loss, steps=4))
        assert_equal(*states)


def test_a_closure_is_averaged_as_well() -> None:
    def body(model, optimizer, session, rank):
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mlp_loss(model, step, rank)
                loss.backward()
                return loss

            optimizer.step(closure)

    states = _loop(body)
    assert_equal(states[0], reference(mlp(), steps=3))


def test_what_error_feedback_owes_reaches_a_parameter_nobody_used() -> None:
    owed: dict[str, float] = {}

    def body(model, optimizer, session, rank):
        model(data(0, rank, 4, 5), "lr").square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fields = session.state_dict()["ranks"][str(rank)]["right.weight"]
        owed[f"{rank}"] = float(fields["error_feedback.residual"].abs().sum())
        model(data(1, rank, 4, 5), "l").square().mean().backward()
        gradient = model.right.weight.grad
        assert gradient is not None
        assert gradient.any()
        assert model.never.weight.grad is None
        optimizer.step()

    states = _loop(body, model=Branches, how="bsp / all_reduce / bf16 + error_feedback / wfbp")
    assert all(value > 0 for value in owed.values())
    assert_equal(*states)


def test_a_model_changed_while_attached_is_named() -> None:
    def body(model, optimizer, session, rank):
        model.double()
        with pytest.raises(UnsupportedGradient, match=r"2\.bias.*float64.*attached as .*float32"):
            model(data(0, rank, 4, 5).double()).square().mean().backward()

    _loop(body)
