"""Dion: against the published algorithm on one machine, on awkward momenta, and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn

import laconic
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.stateful import Factors
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.planner.words import demands
from laconic.synchronization.dion import unit_columns

pytestmark = pytest.mark.timeout(60)
RATE = 0.02
Values = dict[str, torch.Tensor]
Gradient = Callable[[int, int], Values]
"""(step, rank) -> the gradient of every parameter."""


class Parameters(nn.Module):
    """A tall matrix, a wide one, a kernel, a matrix too small for the rank, and a vector."""

    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {
        "tall": (20, 12),
        "wide": (8, 30),
        "kernel": (10, 3, 2, 2),
        "small": (3, 4),
        "bias": (11,),
    }

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in self.SHAPES.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(values.to(dtype)))


def noise(step: int, rank: int) -> Values:
    """Gradients of ranks that have hardly anything in common."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in Parameters.SHAPES.items()
    }


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: Values) -> None:
    """One step in which the gradients are these."""
    loss = sum((value * gradient[name].to(value.dtype)).sum() for name, value in model.named_parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model: nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def remembered(session: laconic.Session, rank: int) -> dict[str, Values]:
    """The saved state of a rank: parameter -> field -> values."""
    return copy.deepcopy(session.state_dict()["ranks"][str(rank)])


def trained(
    strategy: str,
    world_size: int,
    steps: int = 6,
    gradient: Gradient = noise,
    *,
    dtype: torch.dtype = torch.float64,
    rate: float = RATE,
) -> tuple[list[list[Values]], list[list[dict[str, Values]]]]:
    """Parameters and state of every rank: at the start and after every step."""

    def one_rank(transport: InProcessTransport) -> tuple[list[Values], list[dict[str, Values]]]:
        model = Parameters(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            found, states = [snapshot(model)], [remembered(session, transport.rank)]
            for step in range(steps):
                step_on(model, optimizer, gradient(step, transport.rank))
                found.append(snapshot(model))
                states.append(remembered(session, transport.rank))
        return found, states

    ranks = InProcessCluster(world_size).run(one_rank)
    return [found for found, _ in ranks], [states for _, states in ranks]


def scale_of(name: str, rows: int, columns: int) -> float:
    return math.sqrt(rows / columns) if name == "spectral_norm" else 0.2 * math.sqrt(max(rows, columns))


LOW = ("tall", "wide", "kernel")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("mu", "scale"), [(0.95, "rms_norm"), (0.7, "spectral_norm"), (0.0, "rms_norm")])
def test_as_published_for_the_mean_gradient_on_one_machine(world_size: int, mu: float, scale: str) -> None:
    """Momenta stay on their ranks, and every step is that of one machine with the mean gradient."""
    strategy = f"dion(mu={mu}, scale={scale}) / all_reduce / powersgd(rank=2)"
    replicas, states = trained(strategy, world_size)
    x = snapshot(Parameters())
    momentum = {name: torch.zeros_like(value) for name, value in x.items()}
    v = {name: states[0][0][name]["powersgd.q"].T for name in LOW}
    for step in range(6):
        for name, value in x.items():
            slope = sum(noise(step, rank)[name] for rank in range(world_size)) / world_size
            if name not in LOW:
                momentum[name] = mu * momentum[name] + slope
                x[name] = value - RATE * momentum[name].sign()
                continue
            m = (momentum[name] + slope).flatten(1)
            p, _ = torch.linalg.qr(m @ v[name])
            r = m.T @ p
            momentum[name] = (m - (1 - mu) * p @ r.T).view(value.shape)
            v[name] = r / r.norm(dim=0)
            x[name] = value - RATE * scale_of(scale, *m.shape) * (p @ v[name].T).view(value.shape)
        for rank in range(world_size):
            torch.testing.assert_close(replicas[rank][step + 1], x, rtol=1e-8, atol=1e-9)
        for name, value in momentum.items():
            total = sum(states[rank][step + 1][name]["dion.momentum"] for rank in range(world_size))
            torch.testing.assert_close(
                total, value if name in LOW else mu * value, rtol=1e-8, atol=1e-9, msg=f"{name} in step {step}"
            )


def test_each_rank_loses_what_it_has_contributed() -> None:
    """M_i - (1 - mu) P P^T M_i on each rank, with the P of all."""
    _, states = trained("dion(mu=0.5) / all_reduce / powersgd(rank=3)", 2, steps=1)
    before = [noise(0, rank)["wide"] / 2 for rank in range(2)]
    p, _ = torch.linalg.qr(sum(before) @ states[0][0]["wide"]["powersgd.q"].T)
    for rank, m in enumerate(before):
        torch.testing.assert_close(states[rank][1]["wide"]["dion.momentum"], m - 0.5 * p @ (p.T @ m))


@pytest.mark.parametrize("world_size", [2, 4])
def test_with_acpsgd_one_factor_is_exchanged_and_scaled_in_turn(world_size: int) -> None:
    replicas, states = trained("dion(mu=0.9, scale=spectral_norm) / all_reduce / acpsgd(rank=2)", world_size)
    x, m = snapshot(Parameters())["wide"], torch.zeros(8, 30, dtype=torch.float64)
    last = states[0][0]["wide"]["acpsgd.q"].T
    for step in range(6):
        m = m + sum(noise(step, rank)["wide"] for rank in range(world_size)) / world_size
        basis, _ = torch.linalg.qr(last)
        if step % 2:
            last = m.T @ basis
            sent, unit = basis @ last.T, basis @ (last / last.norm(dim=0)).T
        else:
            last = m @ basis
            sent, unit = last @ basis.T, (last / last.norm(dim=0)) @ basis.T
        m = m - 0.1 * sent
        x = x - RATE * math.sqrt(8 / 30) * unit
        for rank in range(world_size):
            torch.testing.assert_close(replicas[rank][step + 1]["wide"], x, rtol=1e-8, atol=1e-9)


def test_a_momentum_of_lower_rank_makes_a_step_of_that_rank() -> None:
    """The columns that are missing are rounding error; scaled to length one they would be noise as large as a step."""

    def one_direction(step: int, rank: int) -> Values:
        generator = torch.Generator().manual_seed(5)
        found = {}
        for name, shape in Parameters.SHAPES.items():
            u, v = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (shape[0], math.prod(shape[1:])))
            found[name] = torch.outer(u, v).reshape(shape) if len(shape) > 1 else u
        return found

    for dtype in (torch.float32, torch.float64):
        replicas, _ = trained(
            "dion(scale=spectral_norm) / all_reduce / powersgd(rank=4)", 2, 3, one_direction, dtype=dtype, rate=1.0
        )
        for step in range(3):
            moved = replicas[0][step]["tall"] - replicas[0][step + 1]["tall"]
            sizes = torch.linalg.svdvals(moved)
            torch.testing.assert_close(sizes[0].item(), math.sqrt(20 / 12), rtol=1e-4, atol=0)
            assert sizes[1] < 1e-4


def test_no_gradient_makes_no_step() -> None:
    def nothing(step: int, rank: int) -> Values:
        return {name: torch.zeros(shape) for name, shape in Parameters.SHAPES.items()}

    for strategy in ("dion", "dion / all_reduce / acpsgd"):
        replicas, states = trained(strategy, 2, 2, nothing, dtype=torch.float32)
        torch.testing.assert_close(replicas[0][-1], replicas[0][0], rtol=0, atol=0)
        assert not states[1][-1]["tall"]["dion.momentum"].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compression", ["powersgd(rank=2)", "acpsgd(rank=2)"])
def test_a_value_that_is_not_finite_reaches_all_ranks_and_is_not_kept(bad: float, compression: str) -> None:
    def once(step: int, rank: int) -> Values:
        values = noise(step, rank)
        if (step, rank) == (1, 1):
            values["wide"][2, 3] = bad
        return values

    replicas, states = trained(f"dion / all_reduce / {compression}", 2, 3, once, dtype=torch.float32)
    for rank in range(2):
        assert replicas[rank][1]["wide"].isfinite().all()
        assert replicas[rank][2]["wide"].isnan().any(), "the step must show it, or a loop could not skip it"
        assert replicas[rank][3]["tall"].isfinite().all()
        for fields in states[rank][3].values():
            assert all(value.isfinite().all() for value in fields.values())


def test_a_length_that_is_not_finite_makes_all_of_a_matrix_nan() -> None:
    left, right = torch.eye(5, 2), torch.ones(2, 7)
    assert unit_columns(Factors(left, right)).left.norm(dim=0).tolist() == pytest.approx([7**-0.5] * 2)
    for bad in (math.nan, math.inf):
        spoiled = right.clone()
        spoiled[0, 0] = bad
        assert unit_columns(Factors(left, spoiled)).left.isnan().all(dim=0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["dion / all_reduce / powersgd(rank=2) / wfbp", "dion / all_reduce / acpsgd(rank=2)"])
def test_replicas_are_equal_bit_for_bit(dtype: torch.dtype, text: str) -> None:
    replicas, _ = trained(text, 4, dtype=dtype)
    for others in replicas[1:]:
        for mine, theirs in zip(replicas[0], others, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_the_compressor_leaves_out_steps_along_signs() -> None:
    text = 'dion / all_reduce / powersgd(rank=2) + per_layer(skip="wide")'
    replicas, _ = trained(text, 2, steps=2)
    first = replicas[0][0]["wide"] - replicas[0][1]["wide"]
    torch.testing.assert_close(first, RATE * (noise(0, 0)["wide"] + noise(0, 1)["wide"]).sign())
    tall = replicas[0][0]["tall"] - replicas[0][1]["tall"]
    assert int(torch.linalg.matrix_rank(tall, rtol=1e-6)) == 2, "the others as always"


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_those_of_two_thin_matrices_and_of_what_is_sent_plainly(world_size: int) -> None:
    strategy = laconic.Strategy.parse("dion / all_reduce / powersgd(rank=2) / fusion")
    specs = [TensorSpec.of(name, value) for name, value in Parameters(torch.float32).named_parameters()]
    predicted = strategy.wire_bytes_per_step(specs, world_size)
    factors = 2 * ((20 + 12) + (8 + 30) + (10 + 12)) + (12 + 11)
    assert predicted == pytest.approx(2 * (world_size - 1) / world_size * 4 * factors, abs=8)

    def one_rank(transport: InProcessTransport) -> int:
        model = Parameters(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            step_on(model, optimizer, noise(0, transport.rank))
            before = session.traffic.sent_bytes("payload")
            step_on(model, optimizer, noise(1, transport.rank))
            return session.traffic.sent_bytes("payload") - before

    assert InProcessCluster(world_size).run(one_rank) == [predicted] * world_size


@pytest.mark.parametrize("compression", ["powersgd(rank=2)", "acpsgd(rank=2)", "powersgd(rank=2) + per_layer"])
def test_a_saved_state_continues_bit_for_bit(compression: str) -> None:
    strategy = f"dion / all_reduce / {compression}"

    def one_rank(transport: InProcessTransport) -> None:
        model, rank = Parameters(torch.float32), transport.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(3):
                step_on(model, optimizer, noise(step, rank))
            saved = copy.deepcopy((model.state_dict(), session.state_dict()))
            for step in range(3, 6):
                step_on(model, optimizer, noise(step, rank))
        again = Parameters(torch.float32)
        optimizer = torch.optim.SGD(again.parameters(), lr=RATE)
        with laconic.attach(again, optimizer, strategy, transport=transport) as session:
            again.load_state_dict(saved[0])
            session.load_state_dict(saved[1])
            for step in range(3, 6):
                step_on(again, optimizer, noise(step, rank))
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))

    InProcessCluster(2).run(one_rank)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (4, 1)])
def test_another_number_of_workers_has_the_same_sum_of_momenta(before: int, after: int) -> None:
    def one_rank(transport: InProcessTransport) -> dict:
        model = Parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = "dion / all_reduce / powersgd(rank=2)"
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(3):
                step_on(model, optimizer, noise(step, transport.rank))
            return copy.deepcopy(session.state_dict())

    saved = InProcessCluster(before).run(one_rank)
    moved = laconic.redistribute(saved, after)
    for name in Parameters.SHAPES:
        old = sum(state["ranks"][str(rank)][name]["dion.momentum"] for rank, state in enumerate(saved))
        new = sum(state["ranks"][str(rank)][name]["dion.momentum"] for rank, state in enumerate(moved))
        assert old.any()
        torch.testing.assert_close(new, old)
    q = saved[0]["ranks"]["0"]["tall"]["powersgd.q"]
    assert all(torch.equal(state["ranks"][str(rank)]["tall"]["powersgd.q"], q) for rank, state in enumerate(moved))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("dion", 0.01),
        ("dion(scale=spectral_norm)", 0.03),
        ("dion / all_reduce / acpsgd", 0.01),
    ],
)
def test_learns(text: str, rate: float) -> None:
    """From data that the ranks do not share."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))

    def one_rank(transport: InProcessTransport) -> tuple[float, float]:
        model = copy.deepcopy(start)
        target = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)) / 4

        def loss(seed: int) -> torch.Tensor:
            inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
            return (model(inputs) - (inputs @ target).tanh()).square().mean()

        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        before = loss(10**6).item()
        with laconic.attach(model, optimizer, text, transport=transport):
            for step in range(100):
                loss(1000 * step + transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        return before, loss(10**6).item()

    before, after = InProcessCluster(2).run(one_rank)[0]
    assert after < before / 4


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), r"SGD has momentum=0\.9.*Write SGD\(\.\.\., momentum=0\)"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), r"momentum=0, nesterov=False"),
        (torch.optim.AdamW, r"AdamW would normalize it once more"),
        (lambda p: torch.optim.Adam(p, betas=(0.0, 0.9)), r"Adam would normalize"),
        (torch.optim.NAdam, r"NAdam would normalize"),
        (torch.optim.Adagrad, r"Adagrad would normalize"),
        (torch.optim.RMSprop, r"RMSprop would normalize"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.3), r"RMSprop has momentum=0\.3"),
        (lambda p: torch.optim.Muon(list(p)[:2]), r"Muon has momentum=0\.95"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_optimizers_that_change_directions_are_refused_by_name(make, reason: str) -> None:
    with pytest.raises(AttachError, match=rf"synchronization\.dion .*{reason}"):
        laconic.Dion().check([], OptimizerFacts.of(make(Parameters().parameters())))


@pytest.mark.filterwarnings("error")
def test_sgd_without_momentum_and_several_optimizers() -> None:
    parameters = list(Parameters().parameters())
    laconic.Dion().check([], OptimizerFacts.of(torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)))
    both = OptimizerFacts.of(torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.AdamW(parameters[2:]))
    with pytest.raises(AttachError, match="SGD and AdamW would normalize"):
        laconic.Dion().check([], both)


def test_shards_are_refused() -> None:
    shard = TensorSpec("weight", (64, 32)).shard(0, 2)
    with pytest.raises(AttachError, match=r'this rank has only a shard of "weight"\. Use "demo"'):
        laconic.Dion().check([shard], OptimizerFacts(name="SGD"))


def test_the_advice_on_the_learning_rate_follows_from_the_scale() -> None:
    assert "a learning rate as for Adam." in demands(laconic.Strategy.parse("dion"))[0]
    assert "a learning rate of about 0.01." in demands(laconic.Strategy.parse("dion(scale=spectral_norm)"))[0]
