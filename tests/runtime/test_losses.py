"""What is lost is measured when somebody listens, and warned of when nothing sends it later."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import LaconicWarning
from tests.runtime.replicas import data, sgd, train


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))


def loss(model: nn.Module, step: int, rank: int):
    return model(data(step, rank, 4, 8)).square().mean()


def test_exchange_events_carry_metrics_every_now_and_then() -> None:
    events = laconic.EventList()
    train(model(), "bsp / all_reduce / bf16 + error_feedback / wfbp", loss=loss, steps=22, events=events)
    exchanges = [event for event in events.events if event.kind == "exchange"]
    measured = [event for event in exchanges if "residual_norm" in event.data]
    assert {event.step for event in exchanges} == set(range(22))
    assert {event.step for event in measured} == {0, 20}
    assert {event.rank for event in measured} == {0, 1}
    for event in measured:
        assert set(event.data) == {"bucket", "wire_bytes", "residual_norm", "relative_error"}
        assert 0 < event.data["relative_error"] < 2**-8  # type: ignore[operator]
        assert event.data["residual_norm"] > 0  # type: ignore[operator]
        assert laconic.Event.from_json(event.to_json()) == event


def test_a_metric_that_is_not_finite_is_left_open() -> None:
    events = laconic.EventList()

    def infinite(model: nn.Module, step: int, rank: int):
        return loss(model, step, rank) * float("inf")

    train(model(), "bsp / all_reduce / bf16 + error_feedback / fusion", loss=infinite, steps=1, events=events)
    measured = [event.data for event in events.events if "residual_norm" in event.data]
    assert measured
    assert all(data["residual_norm"] is None and data["relative_error"] is None for data in measured)


@pytest.mark.parametrize(
    ("compression", "warns"),
    [
        ("powersgd(rank=2)", True),
        ("powersgd(rank=2) + warmup", True),
        ("topk + momentum_correction", True),
        ("powersgd(rank=2) + error_feedback", False),
        ("powersgd(rank=2) + error_feedback + momentum_correction", False),
        ("dgc", False),
        ("bf16", False),
        ("none", False),
    ],
)
def test_losses_that_nobody_makes_good_are_warned_of_on_every_rank(compression: str, warns: bool) -> None:
    def one_rank(transport: InProcessTransport) -> None:
        replica, strategy = model(), f"bsp / all_reduce / {compression}"
        laconic.attach(replica, sgd(replica, strategy), strategy, transport=transport).detach()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        laconic.InProcessCluster(2).run(one_rank)
    told = [str(warning.message) for warning in caught if warning.category is LaconicWarning]
    assert len(told) == 2 * warns, "every rank is told, so that all of them raise where warnings are errors"
    for message in told:
        assert message.startswith(f'compression "{compression}" drops what it does not send')
        assert 'Add "+ error_feedback".' in message
        assert "\n" not in message
