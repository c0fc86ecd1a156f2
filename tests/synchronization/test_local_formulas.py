"""Local updates that correct, delay, tie or thin out what replicas do, against plain loops over plain tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.strategy import PRESETS, Strategy
from tests.least_squares import NAMES, NUMEL, Values, assert_close, each, gradient, mean, start, trained

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
RATE = 0.05
STEPS = 20


def zeros(number: int) -> list[Values]:
    return [{name: torch.zeros(NUMEL, dtype=torch.float64) for name in NAMES} for _ in range(number)]


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_delayed_applies_the_changes_of_others_one_round_late(period: int, momentum: float) -> None:
    """Every replica: its start, the mean changes of all rounds but the last, and its own changes since."""
    x, velocity, expected = each(3), zeros(3), []
    agreed, sent = start(), zeros(3)
    for step in range(STEPS):
        for rank in range(3):
            slope = gradient(x[rank], step, rank)
            for name in NAMES:
                velocity[rank][name] = momentum * velocity[rank][name] + slope[name]
                x[rank][name] = x[rank][name] - 0.02 * velocity[rank][name]
        if (step + 1) % period == 0:
            arrived = mean(sent)
            for rank in range(3):
                # x_i = agreed - sent_i - fresh_i
                fresh = {name: agreed[name] - sent[rank][name] - x[rank][name] for name in NAMES}
                x[rank] = {name: agreed[name] - arrived[name] - fresh[name] for name in NAMES}
                sent[rank] = fresh
            agreed = {name: agreed[name] - arrived[name] for name in NAMES}
        expected.append(copy.deepcopy(x))
    found = trained(f"delayed(period={period})", world_size=3, rate=lambda step: 0.02, momentum=momentum)
    assert_close(found, expected)


@pytest.mark.parametrize(("alpha", "beta"), [(0.25, 0.9), (1.0, 1.0), (0.5, 0.3)])
def test_easgd(alpha: float, beta: float) -> None:
    x, center, expected = each(3), start(), []
    for step in range(STEPS):
        for rank in range(3):
            slope = gradient(x[rank], step, rank)
            x[rank] = {name: x[rank][name] - RATE * slope[name] for name in NAMES}
        if (step + 1) % 4 == 0:
            middle = mean(x)
            center = {name: center[name] + beta * (middle[name] - center[name]) for name in NAMES}
            x = [{name: own[name] - alpha * (own[name] - center[name]) for name in NAMES} for own in x]
        expected.append(copy.deepcopy(x))
    assert_close(trained(f"easgd(period=4, alpha={alpha}, beta={beta})", world_size=3), expected)


def test_fedprox_descends_the_loss_with_its_proximal_term() -> None:
    """The gradient of F_i(x) + mu/2 |x - x_old|^2."""
    x, old, expected = each(3), start(), []
    for step in range(STEPS):
        for rank in range(3):
            slope = gradient(x[rank], step, rank)
            x[rank] = {name: x[rank][name] - RATE * (slope[name] + 2.0 * (x[rank][name] - old[name])) for name in NAMES}
        if (step + 1) % 5 == 0:
            old = mean(x)
            x = [dict(old) for _ in x]
        expected.append(copy.deepcopy(x))
    assert_close(trained("fedprox(period=5, mu=2)", world_size=3), expected)


def test_scaffold_keeps_the_control_variates_of_the_paper() -> None:
    """Option II, with c and every c_i written out, though only changes of parameters are exchanged."""
    x, old, expected = each(3), start(), []
    common, own = zeros(1)[0], zeros(3)
    for step in range(STEPS):
        for rank in range(3):
            slope = gradient(x[rank], step, rank)
            x[rank] = {name: x[rank][name] - RATE * (slope[name] - own[rank][name] + common[name]) for name in NAMES}
        if (step + 1) % 5 == 0:
            before = copy.deepcopy(own)
            for rank in range(3):
                for name in NAMES:
                    moved = (old[name] - x[rank][name]) / (5 * RATE)
                    own[rank][name] = own[rank][name] - common[name] + moved
            learned, earlier = mean(own), mean(before)
            common = {name: common[name] + learned[name] - earlier[name] for name in NAMES}
            old = mean(x)
            x = [dict(old) for _ in x]
        expected.append(copy.deepcopy(x))
    assert_close(trained("scaffold(period=5)", world_size=3), expected)


def test_scaffold_finds_the_common_optimum_also_with_compressed_changes() -> None:
    """Unlike local SGD: its replicas, whose losses have optima of their own, settle elsewhere."""

    def distance(text: str) -> float:
        def rank(transport: InProcessTransport) -> float:
            generator = torch.Generator().manual_seed(7)
            scales = 0.3 + torch.rand(4, 40, generator=generator)
            slopes = 3 * torch.randn(4, 40, generator=generator)
            model = nn.Linear(40, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            with laconic.attach(model, optimizer, text, transport=transport):
                for _ in range(300):
                    weight = model.weight[0]
                    loss = (scales[transport.rank] * weight**2 / 2 - slopes[transport.rank] * weight).sum()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            return float((model.weight[0].detach() - slopes.sum(0) / scales.sum(0)).norm())

        return InProcessCluster(4).run(rank)[0]

    assert distance("local_sgd(period=5) / all_reduce / none") > 0.1
    assert distance("scaffold(period=5) / all_reduce / none") < 0.01
    assert distance("scaffold(period=5) / all_reduce / int4 + error_feedback") < 0.01


def largest_of_chunks(values: torch.Tensor, chunk: int) -> torch.Tensor:
    """The one largest magnitude of each chunk."""
    kept = torch.zeros_like(values)
    for begin in range(0, len(values), chunk):
        place = begin + int(values[begin : begin + chunk].abs().argmax())
        kept[place] = values[place]
    return kept


def two_bits(values: torch.Tensor) -> torch.Tensor:
    """Of what is not zero: sign, and the mean magnitude of those at least as large as the mean, or of the others."""
    sizes = values.abs()
    chosen = sizes > 0
    large = sizes >= sizes[chosen].mean()
    worth = torch.zeros_like(values)
    for group in (chosen & large, chosen & ~large):
        if group.any():
            worth[group] = sizes[group].mean()
    return worth * values.sign()


def test_sparseloco() -> None:
    """Every replica sends 2 bits of its chunks' largest entries, and keeps a decaying sum of what it did not send."""
    x, old, left, expected = each(3), start(), zeros(3), []
    for step in range(STEPS):
        for rank in range(3):
            slope = gradient(x[rank], step, rank)
            x[rank] = {name: x[rank][name] - RATE * slope[name] for name in NAMES}
        if (step + 1) % 4 == 0:
            sent = zeros(3)
            for rank in range(3):
                for name in NAMES:
                    due = 0.95 * left[rank][name] + (old[name] - x[rank][name])
                    sent[rank][name] = two_bits(largest_of_chunks(due, 4))
                    left[rank][name] = due - sent[rank][name]
            middle = mean(sent)
            old = {name: old[name] - middle[name] for name in NAMES}
            x = [dict(old) for _ in x]
        expected.append(copy.deepcopy(x))
    text = PRESETS["sparseloco"][0]
    small = text.replace("lr=1", "period=4, lr=1").replace("density=0.03125, chunk=4096", "density=0.25, chunk=4")
    assert small != text
    assert_close(trained(small, world_size=3), expected)
    assert Strategy.parse("sparseloco").synchronization.remembers_unsent


@pytest.mark.parametrize(("first_every", "second_every"), [(3, 6), (1, 1), (2, 3)])
def test_des_loc_averages_each_moment_at_its_own_period(first_every: int, second_every: int) -> None:
    b1, b2, eps, decay, rate, period = 0.8, 0.9, 1e-8, 0.1, 0.02, 2
    x, m, v, expected = each(3), zeros(3), zeros(3), []
    for step in range(24):
        for rank in range(3):
            slope = gradient(x[rank], step, rank)
            for name in NAMES:
                m[rank][name] = b1 * m[rank][name] + (1 - b1) * slope[name]
                v[rank][name] = b2 * v[rank][name] + (1 - b2) * slope[name] ** 2
                up = m[rank][name] / (1 - b1 ** (step + 1))
                down = (v[rank][name] / (1 - b2 ** (step + 1))).sqrt() + eps
                x[rank][name] = x[rank][name] * (1 - rate * decay) - rate * up / down
        for kept, every in ((x, 1), (m, first_every), (v, second_every)):
            if (step + 1) % (period * every) == 0:
                middle = mean(kept)
                for values in kept:
                    values.update(middle)
        expected.append(copy.deepcopy(x))
    found = trained(
        f"des_loc(period={period}, first_every={first_every}, second_every={second_every})",
        world_size=3,
        steps=24,
        rate=lambda step: rate,
        make=lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(b1, b2), eps=eps, weight_decay=decay),
    )
    assert_close(found, expected)
