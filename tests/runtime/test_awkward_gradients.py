"""What loops do to gradients themselves, each against the average computed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import AttachError, CommunicationError, UnsupportedGradient
from laconic.runtime.hooks import gradient_views
from tests.runtime.awkward import Branches, every_schedule, strategy
from tests.runtime.replicas import assert_equal, data, loop, mlp, mlp_loss, reference, snapshot, train


@pytest.fixture(autouse=True, params=["one by one", "together"])
def copying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here also with the gradients of a bucket copied together, as on a GPU."""
    if request.param == "together":
        monkeypatch.setattr(gradient_views, "_TOGETHER_ON", ("cpu",))


Mess = Callable[[nn.Module, int], None]
"""What the loop does between backward() and step()."""
WORLD_SIZE = 3


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def images_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(data(step, rank, 2, 3, 8, 8)).square().mean()


def fused(model: nn.Module) -> torch.optim.Optimizer:
    # It walks through parameters and gradients side by side in memory, whatever their strides.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def run_steps(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[int], None], mess: Mess) -> None:
    for step in range(5):
        backward(step)
        mess(model, step)
        optimizer.step()
        optimizer.zero_grad()


def with_laconic(mess: Mess, how: str) -> list[dict[str, torch.Tensor]]:
    def body(model, optimizer, session, rank):
        run_steps(model, optimizer, lambda step: images_loss(model, step, rank).backward(), mess)
        for parameter in model.parameters():
            assert parameter.grad is None
        images_loss(model, 9, rank).backward()
        assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())

    return loop(body, model=Images, how=how, world_size=WORLD_SIZE, make_optimizer=fused)


def by_hand(mess: Mess) -> dict[str, torch.Tensor]:
    model = Images()
    optimizer = fused(model)

    def backward(step: int) -> None:
        shares = []
        for rank in range(WORLD_SIZE):
            model.zero_grad()
            images_loss(model, step, rank).backward()
            shares.append([parameter.grad * (1.0 / WORLD_SIZE) for parameter in model.parameters()])
        for parameter, *share in zip(model.parameters(), *shares, strict=True):
            parameter.grad = share[0] + share[1] + share[2]

    run_steps(model, optimizer, backward, mess)
    return snapshot(model)


def halve(model: nn.Module, step: int) -> None:
    if step == 1:
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 0.5


def there_and_back(model: nn.Module, step: int) -> None:
    if step == 1:
        model.double()
        model.float()


def channels_last(model: nn.Module, step: int) -> None:
    if step == 1:
        model.to(memory_format=torch.channels_last)


@every_schedule
@pytest.mark.parametrize("mess", [halve, there_and_back, channels_last])
def test_whoever_points_a_gradient_elsewhere_does_not_move_the_buckets(schedule: str, mess: Mess) -> None:
    states = with_laconic(mess, strategy(schedule))
    expected = by_hand(mess)
    for state in states:
        assert_equal(state, expected)


def test_a_memory_format_changed_under_a_schedule_that_defers_is_named() -> None:
    with pytest.raises(UnsupportedGradient, match=r"changed its memory format.*dear.*attach again"):
        with_laconic(channels_last, strategy("dear(bytes=1KiB)"))


def test_ranks_with_other_memory_formats_are_named() -> None:
    def one_rank(transport: InProcessTransport) -> None:
        model = Images()
        if transport.rank == 1:
            model.to(memory_format=torch.channels_last)
        laconic.attach(model, fused(model), "bsp", transport=transport)

    with pytest.raises(AttachError, match=r"strides of layers\.0\.weight"):
        laconic.InProcessCluster(2).run(one_rank)


@every_schedule
@pytest.mark.parametrize("set_to_none", [True, False])
def test_ordinary_loops_accumulate_and_leave_gradients_in_place(schedule: str, set_to_none: bool) -> None:
    def body(model, optimizer, session, rank):
        for step in range(3):
            with session.accumulate():
                mlp_loss(model, 2 * step, rank).backward()
            mlp_loss(model, 2 * step + 1, rank).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return mlp_loss(model, 2 * step, rank) + mlp_loss(model, 2 * step + 1, rank)

    states = loop(body, how=strategy(schedule))
    expected = reference(mlp(), loss=loss, steps=3)
    for name, value in states[0].items():
        torch.testing.assert_close(value, expected[name])
    assert_equal(*states)


def test_a_gradient_that_was_transposed_and_accumulated_into() -> None:
    def square() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(5, 5)

    def body(model, optimizer, session, rank):
        mlp_loss(model, 7, rank).backward()  # after which buckets stay where they are
        model.zero_grad()
        mlp_loss(model, 0, rank).backward()
        model.weight.grad = model.weight.grad.t()
        mlp_loss(model, 1, rank).backward()
        optimizer.step()

    states = loop(body, model=square)
    model = square()

    def mean(step: int) -> list[torch.Tensor]:
        losses = [mlp_loss(model, step, rank) for rank in range(2)]
        return list(torch.autograd.grad(sum(losses) / 2, list(model.parameters())))

    weight, bias = mean(0)
    weight_2, bias_2 = mean(1)
    torch.testing.assert_close(states[0]["weight"], model.weight - 0.1 * (weight.t() + weight_2 + 0.01 * model.weight))
    torch.testing.assert_close(states[0]["bias"], model.bias - 0.1 * (bias + bias_2 + 0.01 * model.bias))
    assert_equal(*states)


# -- hooks on parameters ---------------------------------------------------------------------------------------------


def masked(parameter: torch.Tensor) -> None:
    parameter.grad.view(-1)[::2] = 0


def doubled(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad * 2


@every_schedule
def test_hooks_registered_after_attaching_change_what_is_exchanged(schedule: str) -> None:
    def body(model, optimizer, session, rank):
        for step in range(4):
            if step == 1:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(masked)
            if step == 2:
                handle = model[0].weight.register_post_accumulate_grad_hook(doubled)
            if step == 3:
                handle.remove()
            mlp_loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if not handles and step >= 1:
            handles.extend(parameter.register_post_accumulate_grad_hook(masked) for parameter in model.parameters())
        if step == 2 and rank == 0:
            handles.append(model[0].weight.register_post_accumulate_grad_hook(doubled))
        if step == 3 and rank == 0:
            handles.pop().remove()
        return mlp_loss(model, step, rank)

    handles: list = []
    states = loop(body, how=strategy(schedule))
    expected = reference(mlp(), loss=loss)
    for state in states:
        assert_equal(state, expected)


def test_hooks_registered_after_attaching_inside_reentrant_checkpoints() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        for parameter in model.parameters():
            if not getattr(parameter, "masked", False):
                parameter.masked = True
                parameter.register_post_accumulate_grad_hook(masked)
        inputs = data(step, rank, 4, 5).requires_grad_()
        hidden = checkpoint(lambda value: torch.tanh(model[0](value)), inputs, use_reentrant=True)
        return checkpoint(model[2], hidden, use_reentrant=True).square().mean()

    for schedule in ("wfbp", "fusion"):
        states = train(mlp(), strategy(schedule), loss=loss)
        assert_equal(states[0], reference(mlp(), loss=loss))
        assert_equal(*states)


# -- a batch that is skipped -----------------------------------------------------------------------------------------


class Interrupt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, interrupted):
        ctx.interrupted = interrupted
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.interrupted:
            raise ValueError("out of memory, on purpose")
        return gradient, None


def heads_loss(model: nn.Module, step: int, rank: int, branch: str, *, interrupted: bool = False) -> torch.Tensor:
    hidden = Interrupt.apply(torch.tanh(model.trunk(data(step, rank, 4, 5))), interrupted)
    return {"l": model.left, "r": model.right}[branch](hidden).square().mean()


def test_gradients_of_a_batch_that_was_skipped_are_not_applied() -> None:
    def body(model, optimizer, session, rank):
        for step, (branch, interrupted) in enumerate([("l", False), ("r", False), ("l", True), ("r", False)]):
            try:
                heads_loss(model, step, rank, branch, interrupted=interrupted).backward()
                optimizer.step()
            except ValueError:
                assert interrupted
            optimizer.zero_grad()

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        number, branch = [(0, "l"), (1, "r"), (3, "r")][step]
        return heads_loss(model, number, rank, branch)

    states = loop(body, model=Branches)
    expected = reference(Branches(), loss=loss, steps=3)
    for state in states:
        assert_equal(state, expected)


def test_a_skipped_batch_whose_gradients_stay_is_named() -> None:
    def body(model, optimizer, session, rank):
        heads_loss(model, 0, rank, "l").backward()
        optimizer.step()  # and no zero_grad(): the next gradients are added to these, inside the bucket
        with pytest.raises(ValueError, match="on purpose"):
            heads_loss(model, 1, rank, "l", interrupted=True).backward()
        with pytest.raises(CommunicationError, match=r"was interrupted, and the gradient of \"left\.bias\".*zero_grad"):
            heads_loss(model, 2, rank, "r").backward()

    loop(body, model=Branches)


def test_a_skipped_batch_between_accumulated_ones() -> None:
    def body(model, optimizer, session, rank):
        with session.accumulate():
            heads_loss(model, 0, rank, "l").backward()
        saved = {parameter: copy.deepcopy(parameter.grad) for parameter in model.parameters()}
        with pytest.raises(ValueError, match="on purpose"):
            heads_loss(model, 1, rank, "r", interrupted=True).backward()
        for parameter, gradient in saved.items():
            parameter.grad = gradient
        with session.accumulate():
            heads_loss(model, 2, rank, "l").backward()
        heads_loss(model, 3, rank, "l").backward()
        assert model.right.weight.grad is None
        optimizer.step()

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return sum((heads_loss(model, number, rank, "l") for number in (0, 2, 3)), torch.zeros(()))

    states = loop(body, model=Branches)
    expected = reference(Branches(), loss=loss, steps=1)
    for name, value in states[0].items():
        torch.testing.assert_close(value, expected[name])
    assert_equal(*states)


# -- optimizers inside the backward pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["bsp", "diloco(period=2)", "bsp / gossip"])
def test_an_optimizer_inside_the_backward_pass_is_refused(how: str) -> None:
    def prepared() -> nn.Module:
        model = mlp()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        return model

    def one_rank(transport: InProcessTransport) -> None:
        model = prepared()
        laconic.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), how, transport=transport)

    with pytest.raises(AttachError, match=r'"0\.weight" has an optimizer of its own.*_apply_optimizer_in_backward'):
        laconic.InProcessCluster(2).run(one_rank)


def test_an_optimizer_put_into_the_backward_pass_later_is_noticed_before_it_steps() -> None:
    def body(model, optimizer, session, rank):
        before = snapshot(model)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        with pytest.raises(AttachError, match="has an optimizer of its own"):
            mlp_loss(model, 0, rank).backward()
        assert_equal(snapshot(model), before)

    loop(body)
