"""Times of layers, by a clock that the model's own layers move."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from laconic.auto import layer_times
from laconic.auto.layer_times import LayerTimes, Passes
from laconic.workload.device_time import DeviceTime

FORWARD_S, BACKWARD_S, OPTIMIZER_S, DATA_S = 2.0, 3.0, 0.5, 0.25
"""Of one layer, of one layer, of a step, of a step."""


class Clock:
    """Time passes when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


class Work(torch.autograd.Function):
    """The identity, which takes time in both passes."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.passes(FORWARD_S)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.passes(BACKWARD_S)
        return gradients[0], None


class Layers(nn.Module):
    """Two layers."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.clock = clock

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return work(self.second(work(self.first(values), self.clock)), self.clock)


@torch.compiler.disable
def work(values: torch.Tensor, clock: Clock) -> torch.Tensor:
    return Work.apply(values, clock)


def timed(wrapped: Callable[[Layers], Callable[[torch.Tensor], torch.Tensor]]) -> Passes | None:
    """Six steps of a model."""
    clock = Clock()
    model = Layers(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job: Any = SimpleNamespace(
        model=model, optimizers=[optimizer], parameters=dict(model.named_parameters()), clock=clock
    )
    forward = wrapped(model)
    times = LayerTimes(job)
    for _ in range(6):
        clock.passes(DATA_S)
        forward(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        clock.passes(OPTIMIZER_S)
        optimizer.zero_grad()
        times.step_made()
    times.detach()
    return times.passes()


def test_both_passes_are_timed_layer_by_layer() -> None:
    passes = timed(lambda model: model)
    assert passes is not None
    assert passes.between_s == pytest.approx(DATA_S + OPTIMIZER_S)
    assert passes.forward_s == pytest.approx(2 * FORWARD_S)
    assert passes.ready_s["second.weight"] == pytest.approx(BACKWARD_S)
    assert passes.ready_s["first.weight"] == pytest.approx(2 * BACKWARD_S)
    assert passes.compute_s == pytest.approx(2 * (FORWARD_S + BACKWARD_S) + DATA_S + OPTIMIZER_S)


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_on_a_gpu_exchanges_wait_for_the_end_of_the_pass_meanwhile(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class HostTime(DeviceTime):
        def __init__(self, device: torch.device, clock: Any) -> None:
            super().__init__(torch.device("cpu"), clock)

    class Parameter(nn.Parameter):
        device = torch.device(where)

    monkeypatch.setattr(layer_times, "DeviceTime", HostTime)
    model = nn.Linear(2, 2)
    weight = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job: Any = SimpleNamespace(model=model, optimizers=[optimizer], parameters={"weight": weight}, clock=Clock())
    times = LayerTimes(job)
    assert job.after_backward == (where == "cuda")
    times.detach()
    assert not job.after_backward


@pytest.mark.parametrize(
    "wrapped",
    [
        pytest.param(lambda model: torch.compile(model, backend="eager"), id="compiled around it"),
        pytest.param(lambda model: model.forward, id="not called as a module"),
    ],
)
def test_where_hooks_see_no_forward_pass_the_sum_of_both_is_still_right(
    wrapped: Callable[[Layers], Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    passes = timed(wrapped)
    assert passes is not None
    assert set(passes.ready_s) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    whole_s = 2 * (FORWARD_S + BACKWARD_S) + DATA_S
    assert passes.forward_s == pytest.approx(whole_s / 3)
    assert passes.compute_s == pytest.approx(whole_s + OPTIMIZER_S)
