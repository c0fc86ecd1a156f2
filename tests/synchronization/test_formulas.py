"""Every rule against n workers simulated with plain loops over plain tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch

from tests.least_squares import (
    NAMES,
    NUMEL,
    Replicas,
    Values,
    assert_close,
    each,
    gradient,
    largest,
    mean,
    start,
    trained,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
RATE = 0.05
STEPS = 20

several_workers = pytest.mark.parametrize("workers", [1, 3])


def descended(x: Replicas, step: int, rate: float = RATE) -> Replicas:
    """Every worker after one step of its own."""
    slopes = [gradient(values, step, rank) for rank, values in enumerate(x)]
    return [
        {name: values[name] - rate * slope[name] for name in NAMES} for values, slope in zip(x, slopes, strict=True)
    ]


@pytest.mark.parametrize(("period", "post_local"), [(1, 0), (4, 0), (4, 6), (3, 7)])
def test_local_sgd(period: int, post_local: int) -> None:
    x, expected = each(3), []
    for step in range(STEPS):
        x = descended(x, step)
        if step + 1 <= post_local or (step + 1) % period == 0:
            x = [mean(x) for _ in x]
        expected.append(x)
    assert_close(trained(f"local_sgd(period={period}, post_local={post_local})", world_size=3), expected)


def test_local_sgd_with_momentum_keeps_each_workers_own() -> None:
    x, velocity, expected = each(2), [dict.fromkeys(NAMES, torch.zeros(NUMEL)) for _ in range(2)], []
    for step in range(STEPS):
        for rank in range(2):
            slope = gradient(x[rank], step, rank)
            velocity[rank] = {name: 0.8 * velocity[rank][name] + slope[name] for name in NAMES}
            x[rank] = {name: x[rank][name] - 0.02 * velocity[rank][name] for name in NAMES}
        if (step + 1) % 5 == 0:
            x = [mean(x) for _ in x]
        expected.append(copy.deepcopy(x))
    assert_close(trained("local_sgd(period=5)", world_size=2, rate=lambda step: 0.02, momentum=0.8), expected)


@several_workers
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.7), (0.6, 0.4)])
def test_slowmo_with_a_changing_learning_rate(workers: int, alpha: float, beta: float) -> None:
    def rate(step: int) -> float:
        return 0.06 / (1 + 0.2 * step)

    x, old, slow, expected = each(workers), start(), dict.fromkeys(NAMES, 0.0), []
    for step in range(STEPS):
        x = descended(x, step, rate(step))
        if (step + 1) % 4 == 0:
            middle, gamma = mean(x), rate(step)
            slow = {name: beta * slow[name] + (old[name] - middle[name]) / gamma for name in NAMES}
            old = {name: old[name] - alpha * gamma * slow[name] for name in NAMES}
            x = [dict(old) for _ in x]
        expected.append(x)
    assert_close(trained(f"slowmo(period=4, alpha={alpha}, beta={beta})", world_size=workers, rate=rate), expected)


def test_slowmo_when_the_learning_rate_has_come_down_to_zero() -> None:
    """The round takes in what was learned before, though there is no rate left to measure it by."""
    rates = [0.05, 0.05, 0.05, 0.0]
    x = each(2)
    for step, rate in enumerate(rates):
        x = descended(x, step, rate)
    found = trained("slowmo(period=4)", world_size=2, steps=4, rate=lambda step: rates[step])
    assert_close(found[-1:], [[mean(x), mean(x)]])


@several_workers
def test_diloco_takes_the_outer_step_of_torch(workers: int) -> None:
    x, expected = each(workers), []
    agreed = {name: value.clone().requires_grad_() for name, value in start().items()}
    outer = torch.optim.SGD(agreed.values(), lr=0.6, momentum=0.8, nesterov=True)
    for step in range(STEPS):
        x = descended(x, step)
        if (step + 1) % 5 == 0:
            middle = mean(x)
            for name in NAMES:
                agreed[name].grad = agreed[name].detach() - middle[name]
            outer.step()
            x = [{name: agreed[name].detach().clone() for name in NAMES} for _ in x]
        expected.append(x)
    assert_close(trained("diloco(period=5, lr=0.6, momentum=0.8)", world_size=workers), expected)


def nesterov(old: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor, lr: float, beta: float) -> tuple:
    momentum = beta * momentum + change
    return old - lr * (change + beta * momentum), momentum


@pytest.mark.parametrize(
    ("fragments", "overlap", "alpha"), [(1, 0, 0.0), (2, 0, 0.0), (4, 0, 0.5), (2, 3, 0.5), (4, 5, 0.25), (3, 2, 0.0)]
)
def test_streaming_diloco(fragments: int, overlap: int, alpha: float) -> None:
    period, lr, beta = 6, 0.7, 0.9
    # Four parameters of the same size, last registered first, in parts of about the same size.
    parts = {1: ["dcba"], 2: ["dc", "ba"], 3: ["d", "cb", "a"], 4: ["d", "c", "b", "a"]}[fragments]
    x, old, momentum, expected = each(3), start(), dict.fromkeys(NAMES, torch.zeros(NUMEL)), []
    under_way: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for step in range(STEPS):
        x = descended(x, step)
        complete = step + 1
        for part, names in enumerate(parts):
            if complete % period == part * period // fragments:
                middle = mean(x)
                changes = [(name, old[name] - middle[name]) for name in names]
                under_way.setdefault(complete + overlap, []).extend(changes)
        for name, change in under_way.pop(complete, []):
            old[name], momentum[name] = nesterov(old[name], change, momentum[name], lr, beta)
            for values in x:
                values[name] = alpha * values[name] + (1 - alpha) * old[name]
        expected.append(copy.deepcopy(x))
    text = f"streaming_diloco(period={period}, fragments={fragments}, overlap={overlap}, alpha={alpha})"
    assert_close(trained(text, world_size=3), expected)


def cosine_transform(values: torch.Tensor) -> torch.Tensor:
    size = len(values)
    return torch.stack(
        [
            math.sqrt((1 if i == 0 else 2) / size)
            * sum(values[j] * math.cos(math.pi * (2 * j + 1) * i / (2 * size)) for j in range(size))
            for i in range(size)
        ]
    )


def back_transform(coefficients: torch.Tensor) -> torch.Tensor:
    size = len(coefficients)
    return torch.stack(
        [
            sum(
                math.sqrt((1 if i == 0 else 2) / size)
                * coefficients[i]
                * math.cos(math.pi * (2 * j + 1) * i / (2 * size))
                for i in range(size)
            )
            for j in range(size)
        ]
    )


def fast_components(values: torch.Tensor) -> torch.Tensor:
    """The largest quarter of the coefficients of chunks of 8, transformed back."""
    chunks = values.split(8)
    return torch.cat(
        [back_transform(largest(cosine_transform(chunk), math.ceil(0.25 * len(chunk)))) for chunk in chunks]
    )


CHUNKED = "dct_topk(density=0.25, chunk=8, route=gather)"


@several_workers
def test_decoupled_momentum(workers: int) -> None:
    x, old, expected = each(workers), start(), []
    momenta = [dict.fromkeys(NAMES, torch.zeros(NUMEL)) for _ in x]
    for step in range(STEPS):
        x = descended(x, step)
        if (step + 1) % 3 == 0:
            sent = []
            for values, momentum in zip(x, momenta, strict=True):
                for name in NAMES:
                    momentum[name] = 0.9 * momentum[name] + (old[name] - values[name])
                sent.append({name: fast_components(momentum[name]) for name in NAMES})
                for name in NAMES:
                    momentum[name] = momentum[name] - sent[-1][name]
            middle = mean(sent)
            old = {name: old[name] - 0.7 * middle[name] for name in NAMES}
            x = [dict(old) for _ in x]
        expected.append(x)
    assert_close(trained(f"decoupled_momentum(period=3) / all_reduce / {CHUNKED}", world_size=workers), expected)


@several_workers
def test_demo(workers: int) -> None:
    x, expected = start(), []
    momenta = [dict.fromkeys(NAMES, torch.zeros(NUMEL)) for _ in range(workers)]
    for step in range(STEPS):
        sent = []
        for rank, momentum in enumerate(momenta):
            slope = gradient(x, step, rank)
            for name in NAMES:
                momentum[name] = 0.9 * momentum[name] + slope[name]
            sent.append({name: fast_components(momentum[name]) for name in NAMES})
            for name in NAMES:
                momentum[name] = momentum[name] - sent[-1][name]
        middle = mean(sent)
        x = {name: x[name] - 0.01 * middle[name].sign() for name in NAMES}
        expected.append([x] * workers)
    found = trained(f"demo(beta=0.9) / all_reduce / {CHUNKED}", world_size=workers, rate=lambda step: 0.01)
    assert_close(found, expected)


def with_residual(
    inputs: list[Values], residuals: list[Values], send: Callable[[torch.Tensor], torch.Tensor]
) -> Values:
    """The mean of what is sent of each worker's input and residual; residuals are replaced."""
    sent = []
    for values, residual in zip(inputs, residuals, strict=True):
        whole = {name: values[name] + residual[name] for name in NAMES}
        sent.append({name: send(whole[name]) for name in NAMES})
        for name in NAMES:
            residual[name] = whole[name] - sent[-1][name]
    return mean(sent)


def two_largest(values: torch.Tensor) -> torch.Tensor:
    return largest(values, 2)


def scaled_sign(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().mean()
    return torch.where(values >= 0, scale, -scale)


@pytest.mark.parametrize(
    ("compression", "send"),
    [("topk(density=0.15, route=gather)", two_largest), ("ef_signsgd(route=gather)", scaled_sign)],
)
def test_error_feedback_on_gradients(compression: str, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, expected = start(), []
    residuals = [dict.fromkeys(NAMES, torch.zeros(NUMEL)) for _ in range(3)]
    for step in range(STEPS):
        middle = with_residual([gradient(x, step, rank) for rank in range(3)], residuals, send)
        x = {name: x[name] - RATE * middle[name] for name in NAMES}
        expected.append([x] * 3)
    assert_close(trained(f"bsp / all_reduce / {compression} + error_feedback", world_size=3), expected)


@pytest.mark.parametrize(
    ("compression", "send"),
    [("topk(density=0.15, route=gather)", two_largest), ("ef_signsgd(route=gather)", scaled_sign)],
)
def test_error_feedback_on_the_changes_of_diloco(
    compression: str, send: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x, old, momentum, expected = each(3), start(), dict.fromkeys(NAMES, torch.zeros(NUMEL)), []
    residuals = [dict.fromkeys(NAMES, torch.zeros(NUMEL)) for _ in range(3)]
    for step in range(STEPS):
        x = descended(x, step)
        if (step + 1) % 4 == 0:
            changes = [{name: old[name] - values[name] for name in NAMES} for values in x]
            middle = with_residual(changes, residuals, send)
            for name in NAMES:
                old[name], momentum[name] = nesterov(old[name], middle[name], momentum[name], 0.7, 0.9)
            x = [dict(old) for _ in x]
        expected.append(x)
    assert_close(trained(f"diloco(period=4) / all_reduce / {compression} + error_feedback", world_size=3), expected)
