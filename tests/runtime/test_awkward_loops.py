"""Training loops that break naive gradient averaging, each against the average computed by hand."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from laconic.errors import AttachError, CommunicationError, UnsupportedGradient
from tests.runtime.awkward import Convolutions, every_schedule, strategy
from tests.runtime.replicas import assert_equal, data, loop, mlp, mlp_loss, reference, sgd, snapshot, train


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

    states = loop(body, how=strategy(schedule))
    expected = reference(mlp(), loss=loss, steps=3)
    for name, value in states[0].items():
        torch.testing.assert_close(value, expected[name])
    assert_equal(*states)


def test_accumulation_by_a_flag_and_with_one_context_entered_again() -> None:
    def by_a_flag(model, optimizer, session, rank):
        for index in range(4):
            with session.accumulate(index < 3):
                (mlp_loss(model, index, rank) / 4).backward()
            assert bool(session.traffic.sent_bytes("payload")) == (index == 3)
        optimizer.step()

    def entered_again(model, optimizer, session, rank):
        alone = session.accumulate()
        for index in range(3):
            with alone, alone:
                (mlp_loss(model, index, rank) / 4).backward()
            assert session.traffic.sent_bytes("payload") == 0
        (mlp_loss(model, 3, rank) / 4).backward()
        optimizer.step()

    def loss(model, step, rank):
        return sum(mlp_loss(model, index, rank) for index in range(4)) / 4

    expected = reference(mlp(), loss=loss, steps=1)
    for body in (by_a_flag, entered_again):
        for state in loop(body):
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name])


def test_gradients_that_are_never_zeroed_and_two_backward_passes_per_step() -> None:
    def body(model, optimizer, session, rank):
        for step in range(3):
            mlp_loss(model, 2 * step, rank).backward()
            mlp_loss(model, 2 * step + 1, rank).backward()
            optimizer.step()

    states = loop(body)
    model = mlp()
    optimizer = sgd(model)
    for step in range(3):
        for part in (2 * step, 2 * step + 1):
            (sum(mlp_loss(model, part, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
    for name, value in snapshot(model).items():
        torch.testing.assert_close(states[0][name], value)
    assert_equal(*states)


NO_GRADIENTS = (
    "demo / all_reduce / dct_topk(density=0.5)",
    "dion / all_reduce / powersgd(rank=1)",
    "onebit_adam(total_steps=20)",
    "zero_one_adam(total_steps=20)",
    "bsp / all_reduce / dgc(density=0.5)",
    "bsp / all_reduce / topk(density=0.5) + error_feedback + momentum_correction",
    "bsp / all_reduce / signsgd",
)
"""Strategies after which .grad holds a momentum, a velocity or a direction."""


def _two_passes(model, optimizer, session, rank):
    mlp_loss(model, 0, rank).backward()
    mlp_loss(model, 1, rank).backward()


def _never_zeroed(model, optimizer, session, rank):
    for step in range(2):
        mlp_loss(model, step, rank).backward()
        optimizer.step()


def _accumulated_on_top(model, optimizer, session, rank):
    mlp_loss(model, 0, rank).backward()
    with session.accumulate():
        mlp_loss(model, 1, rank).backward()


@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
@pytest.mark.parametrize("body", [_two_passes, _never_zeroed, _accumulated_on_top])
@pytest.mark.parametrize("how", NO_GRADIENTS)
def test_a_pass_that_would_add_to_a_result_that_is_no_gradient_is_refused(how: str, body) -> None:
    with pytest.raises(CommunicationError, match=r"would add to the gradient of .* inside session.accumulate\(\)"):
        loop(body, how=how, make_optimizer=lambda model: sgd(model, how))


@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
@pytest.mark.parametrize("how", [*NO_GRADIENTS, "bsp / all_reduce / int4 + error_feedback", "local_sgd(period=2)"])
def test_a_second_exchange_in_a_step_warns_once_where_it_changes_a_momentum(how: str) -> None:
    def body(model, optimizer, session, rank):
        for step in range(4):
            mlp_loss(model, 2 * step, rank).backward()
            optimizer.zero_grad()
            mlp_loss(model, 2 * step + 1, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        loop(body, how=how, make_optimizer=lambda model: sgd(model, how))
    said = [str(one.message) for one in given if "2 backward passes have exchanged" in str(one.message)]
    keeps_a_momentum = how in NO_GRADIENTS and "signsgd" not in how
    assert len(said) == (2 if keeps_a_momentum else 0)  # one on each rank
    first = 2 if "one" in how else 0  # after the warm-up
    assert all(f"of step {first}," in text and how in text for text in said)


@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
@pytest.mark.parametrize("how", NO_GRADIENTS)
def test_gradients_set_to_zero_in_place_may_be_added_to(how: str) -> None:
    def body(model, optimizer, session, rank):
        for step in range(3):
            for index in range(2):
                with session.accumulate(index == 0):
                    mlp_loss(model, 2 * step + index, rank).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    def freed(model, optimizer, session, rank):
        for step in range(3):
            with session.accumulate():
                mlp_loss(model, 2 * step, rank).backward()
            mlp_loss(model, 2 * step + 1, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    kept, freed_ones = [loop(one, how=how, make_optimizer=lambda model: sgd(model, how))[0] for one in (body, freed)]
    assert_equal(kept, freed_ones)


def test_clipping_sees_the_averaged_gradient() -> None:
    norms: dict[int, list[float]] = {0: [], 1: []}

    def body(model, optimizer, session, rank):
        for step in range(3):
            mlp_loss(model, step, rank).backward()
            norms[rank].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
            optimizer.zero_grad()

    states = loop(body)
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

    assert_equal(*loop(body))


def test_differentiable_gradients_are_refused() -> None:
    def body(model, optimizer, session, rank):
        mlp_loss(model, 0, rank).backward(create_graph=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedGradient, match="create_graph"):
            loop(body)


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
        loop(body)


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
        with pytest.raises(CommunicationError, match="interrupted after a part of its gradients had been sent"):
            mlp_loss(model, 0, rank).backward()

    loop(body, how=strategy("wfbp"))


@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
@pytest.mark.parametrize(
    "how",
    [
        "bsp / all_reduce / topk(density=0.2) + error_feedback",
        "bsp / all_reduce / topk(density=0.2) + error_feedback / priority",
        "demo",
        "onebit_adam(total_steps=10, first=none, refresh_share=0) / all_reduce / none",
        "zero_one_adam(total_steps=10, first=none, period=2, refresh_share=0) / all_reduce / none",
        "diloco(period=2)",
    ],
)
def test_a_layer_frozen_while_attached_stays_as_it_is(how: str) -> None:
    """Residuals, and momenta of laconic's own, must not move it."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        adam = how.partition("(")[0].endswith("adam")
        return torch.optim.AdamW(model.parameters()) if adam else torch.optim.SGD(model.parameters(), lr=0.05)

    def body(model, optimizer, session, rank):
        for step in range(10):
            if step == 4:  # after a round of those strategies that have rounds
                session.settle()
                model[0].requires_grad_(False)
                before = snapshot(model[0])
            mlp_loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.settle()
        assert_equal(snapshot(model[0]), before)

    one, other = loop(body, how=how, make_optimizer=make)
    assert_equal(one, other)


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

    loop(unfrozen_later, model=frozen_first)

    def only_accumulated(model, optimizer, session, rank):
        with session.accumulate():
            mlp_loss(model, 0, rank).backward()
        with pytest.raises(CommunicationError, match="only accumulated"):
            optimizer.step()

    loop(only_accumulated)

    def set_by_hand(model, optimizer, session, rank):
        gradients = torch.autograd.grad(mlp_loss(model, 0, rank), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        with pytest.raises(CommunicationError, match="never exchanged"):
            optimizer.step()

    loop(set_by_hand)


def test_steps_without_a_pass_and_two_steps_after_one() -> None:
    def body(model, optimizer, session, rank):
        optimizer.step()  # some schedules of learning rates begin like this
        for step in range(2):
            mlp_loss(model, step, rank).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(*loop(body))


@pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")
@pytest.mark.parametrize(
    "how",
    [
        "bsp / all_reduce / none / priority",
        "bsp / all_reduce / powersgd(rank=1) + error_feedback",
        "bsp / parameter_server",
        "demo",
        "onebit_adam(total_steps=20)",
    ],
)
@pytest.mark.parametrize("left_out", [0, 4])
def test_a_step_that_one_rank_alone_leaves_out_is_refused(how: str, left_out: int) -> None:
    def body(model, optimizer, session, rank):
        for step in range(5):
            mlp_loss(model, step, rank).backward()
            if rank != 1 or step != left_out:
                optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(
        CommunicationError,
        match=r"rank 1 has made .*left out on one rank alone|ranks (disagree on|sent different things)",
    ):
        loop(body, how=how, make_optimizer=lambda model: sgd(model, how))


def test_steps_that_all_ranks_leave_out_change_nothing() -> None:
    def body(model, optimizer, session, rank):
        for step in range(4):
            mlp_loss(model, step, rank).backward()
            if step % 2:
                optimizer.step()
            optimizer.zero_grad()
        assert session.step == 2

    assert_equal(*loop(body))


def test_a_closure_is_averaged_as_well() -> None:
    def body(model, optimizer, session, rank):
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mlp_loss(model, step, rank)
                loss.backward()
                return loss

            optimizer.step(closure)

    states = loop(body)
    assert_equal(states[0], reference(mlp(), steps=3))


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

    loop(body, model=Convolutions)
