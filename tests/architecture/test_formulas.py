"""Gossip in all its forms against n workers simulated with plain loops over plain tensors."""

from __future__ import annotations

import pytest

import laconic
from laconic.architecture.graphs.topologies import TOPOLOGIES
from tests.least_squares import NAMES, Replicas, assert_close, each, gradient, largest, trained

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
RATE = 0.05
STEPS = 20


def ring(rank: int, size: int) -> set[int]:
    return {rank, (rank + 1) % size, (rank - 1) % size}


def mixed(x: Replicas, heard: list[set[int]]) -> Replicas:
    """Every worker at the mean of those it hears, itself among them."""
    return [{name: sum(x[other][name] for other in who) / len(who) for name in NAMES} for who in heard]


def dpsgd(workers: int, heard_in: object, period: int = 1) -> list[Replicas]:
    """x_i <- sum_j W_ij x_j - eta g_i(x_i): mixing while the gradient is computed, every `period` steps."""
    x, expected, rounds = each(workers), [], 0
    for step in range(STEPS):
        slopes = [gradient(values, step, rank) for rank, values in enumerate(x)]
        if step and step % period == 0:
            x = mixed(x, heard_in(rounds))  # type: ignore[operator]
            rounds += 1
        x = [
            {name: values[name] - RATE * slope[name] for name in NAMES} for values, slope in zip(x, slopes, strict=True)
        ]
        expected.append(x)
    return expected


schedules = pytest.mark.parametrize("schedule", ["fusion", "wfbp", "sequential"])


@schedules
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_dpsgd_on_a_ring(workers: int, schedule: str) -> None:
    expected = dpsgd(workers, lambda round: [ring(rank, workers) for rank in range(workers)])
    assert_close(trained(f"bsp / gossip / none / {schedule}", world_size=workers), expected)


@schedules
def test_one_peer_exponential(schedule: str) -> None:
    """In turn each hears the one that stands 1, 2 and 4 places before it."""
    expected = dpsgd(5, lambda round: [{rank, (rank - [1, 2, 4][round % 3]) % 5} for rank in range(5)])
    assert_close(trained(f"bsp / gossip(one_peer_exponential) / none / {schedule}", world_size=5), expected)


def drawn(name: str, workers: int, round: int, seed: int) -> list[int]:
    """Whom each worker sends to in a round, itself if to nobody; that it is drawn well is tested elsewhere."""
    sends = [TOPOLOGIES[name].neighbourhood(rank, workers, round, seed).sends for rank in range(workers)]
    return [peer[0] if peer else rank for rank, peer in enumerate(sends)]


def matching(workers: int, round: int, seed: int) -> list[set[int]]:
    return [{rank, partner} for rank, partner in enumerate(drawn("random_pairs", workers, round, seed))]


@schedules
def test_random_pairs(schedule: str) -> None:
    expected = dpsgd(5, lambda round: matching(5, round, 3))
    assert_close(trained(f"bsp / gossip(random_pairs, seed=3) / none / {schedule}", world_size=5), expected)


@schedules
def test_local_steps_between_rounds_of_gossip(schedule: str) -> None:
    expected = dpsgd(4, lambda round: matching(4, round, 0), period=3)
    assert_close(trained(f"local_sgd(period=3) / gossip(random_pairs) / none / {schedule}", world_size=4), expected)


@schedules
@pytest.mark.parametrize("period", [1, 3])
def test_push_sum_where_weights_differ(period: int, schedule: str) -> None:
    """x_i <- sum_j P_ij x_j - eta g_i(z_i),   w_i <- sum_j P_ij w_j,   z_i = x_i / w_i."""
    workers = 4
    x, w, expected, rounds = each(workers), [1.0] * workers, [], 0
    for step in range(STEPS):
        z = [{name: values[name] / part for name in NAMES} for values, part in zip(x, w, strict=True)]
        slopes = [gradient(values, step, rank) for rank, values in enumerate(z)]
        if step and step % period == 0:
            to = drawn("random_targets", workers, rounds, 0)
            rounds += 1
            heard = [[rank, *(other for other in range(workers) if to[other] == rank)] for rank in range(workers)]
            x = [{name: sum(x[other][name] / 2 for other in who) for name in NAMES} for who in heard]
            w = [sum(w[other] / 2 for other in who) for who in heard]
        x = [
            {name: values[name] - RATE * slope[name] for name in NAMES} for values, slope in zip(x, slopes, strict=True)
        ]
        expected.append([{name: values[name] / part for name in NAMES} for values, part in zip(x, w, strict=True)])
    when = "bsp" if period == 1 else f"local_sgd(period={period})"
    weights: list[float] = []

    def look(session: laconic.Session) -> None:
        state = session.state_dict()["ranks"][str(session.rank)]
        weights.append(state["a"]["push_sum.weight"].item())

    found = trained(f"{when} / push_sum(random_targets) / none / {schedule}", world_size=workers, after_step=look)
    assert_close(found, expected)
    assert max(weights) > 1.2
    assert min(weights) < 0.8


@pytest.mark.parametrize("topology", ["one_peer_exponential", "exponential", "ring"])
def test_push_sum_on_balanced_graphs_is_gossip(topology: str) -> None:
    found = trained(f"bsp / push_sum({topology})", world_size=4)
    same = trained(f"bsp / gossip({topology})", world_size=4)
    assert_close(found, [[{name: values[name].double() for name in NAMES} for values in step] for step in same])


@pytest.mark.slow
@schedules
@pytest.mark.parametrize(
    ("text", "send"), [("topk(density=0.25)", lambda values: largest(values, 3)), ("none", lambda values: values)]
)
def test_choco(text: str, send: object, schedule: str) -> None:
    """q_i = C(x_i - xh_i), xh_i <- xh_i + q_i, x_i <- x_i + gamma sum_j W_ij (xh_j - xh_i) - eta g_i."""
    workers, gamma = 4, 0.4
    x, public, expected = each(workers), each(workers), []
    for step in range(STEPS):
        slopes = [gradient(values, step, rank) for rank, values in enumerate(x)]
        if step:
            for rank, name in ((rank, name) for rank in range(workers) for name in NAMES):
                public[rank][name] = public[rank][name] + send(x[rank][name] - public[rank][name])  # type: ignore[operator]
            x = [
                {
                    name: x[rank][name]
                    + gamma * sum((public[other][name] - public[rank][name]) / 3 for other in ring(rank, workers))
                    for name in NAMES
                }
                for rank in range(workers)
            ]
        x = [
            {name: values[name] - RATE * slope[name] for name in NAMES} for values, slope in zip(x, slopes, strict=True)
        ]
        expected.append(x)
    assert_close(trained(f"bsp / choco(gamma={gamma}) / {text} / {schedule}", world_size=workers), expected)


@pytest.mark.parametrize(
    ("compression", "rate"),
    [
        ("int8", 0.2),
        ("topk(density=0.1)", 0.2),
        ("topk(density=0.5)", 0.2),
        ("topk(density=0.01)", 0.2 * 0.1**0.6),
        ("topk(density=0.01) + chain(second=int4)", 0.2 * 0.1**0.6),
        ("topk(density=0.1) + chain(second=topk(density=0.1))", 0.2 * 0.1**0.6),
        ("topk(density=0.5) + chain(second=cocktail(density=0.02))", 0.005),
        ("int8 + warmup(first=topk(density=0.01), steps=5)", 0.2 * 0.1**0.6),
        ("randomk(density=0.01) + per_layer", 0.005),
        ("randomk(density=0.01)", 0.005),
        ("randomk(density=0.9)", 0.2),
    ],
)
def test_the_step_of_choco_fits_the_share_that_is_sent(compression: str, rate: float) -> None:
    for gamma, expected in (("", rate), ("(gamma=0.7)", 0.7)):
        strategy = laconic.Strategy.parse(f"bsp / choco{gamma} / {compression}")
        assert strategy.architecture.copy_rate(strategy.compression.traits) == pytest.approx(expected)
