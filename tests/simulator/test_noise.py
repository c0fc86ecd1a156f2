"""Compute times that vary: whoever waits for many is held up by the slowest of them."""

from __future__ import annotations

import numpy as np
import pytest

from laconic.simulator import Conditions, Prediction, simulate
from laconic.simulator.noise import _slowest
from laconic.simulator.prediction import Spread
from tests.simulator.jobs import Line, hosts, job

JOB = job((0.01, 0.02, 4_000_000))
FAST = Line(byte_s=1e-15)


def with_noise(strategy: str, workers: int, ratio: float = 0.1, **more: object) -> Prediction:
    conditions = Conditions(noise_ratio=ratio, **more)  # type: ignore[arg-type]
    return simulate(strategy, JOB, hosts(workers), network=FAST, conditions=conditions).prediction


def spread(found: Prediction) -> Spread:
    assert found.spread is not None
    return found.spread


@pytest.mark.parametrize("num_ranks", [1, 4, 64, 1000])
def test_the_slowest_of_many_is_the_largest_of_as_many_draws(num_ranks: int) -> None:
    random, ratio = np.random.default_rng(1), 0.1
    sigma = np.sqrt(np.log1p(ratio**2))
    drawn = np.exp(sigma * random.standard_normal((4000, num_ranks)) - sigma**2 / 2).max(axis=1)
    found = _slowest(ratio, num_ranks, random.random(4000))
    for quantile in (0.05, 0.5, 0.95):
        assert np.quantile(found, quantile) == pytest.approx(np.quantile(drawn, quantile), rel=0.01)


def test_one_rank_takes_its_usual_time_on_average() -> None:
    found = _slowest(0.2, 1, np.random.default_rng(0).random(20_000))
    assert found.mean() == pytest.approx(1, abs=0.01)
    assert found.std() == pytest.approx(0.2, abs=0.01)


def test_steps_get_longer_with_workers_where_all_wait_for_all() -> None:
    medians = [spread(with_noise("ddp", workers)).median_s for workers in (1, 4, 16, 256, 4096, 20_000)]
    assert medians == sorted(medians)
    assert medians[0] == pytest.approx(JOB.compute_s, rel=0.05)
    # The largest of 4096 normal draws lies 3.5 deviations up in the median, that of 20,000 3.9.
    sigma = np.sqrt(np.log1p(0.01))
    for median_s, above in ((medians[-2], 3.57), (medians[-1], 3.96)):
        assert median_s == pytest.approx(JOB.compute_s * np.exp(above * sigma - sigma**2 / 2), rel=0.02)


def test_most_steps_lie_where_it_says() -> None:
    for strategy in ("ddp", "dear", "local_sgd(period=4)", "asp / parameter_server / none", "d-psgd"):
        found = spread(with_noise(strategy, 8))
        assert found.low_s < found.median_s < found.high_s


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert with_noise("ddp", 8, seed=3) == with_noise("ddp", 8, seed=3)
    assert spread(with_noise("ddp", 8, seed=3)) != spread(with_noise("ddp", 8, seed=4))


def test_whoever_waits_for_nobody_is_held_up_by_nobody() -> None:
    few, many = (spread(with_noise("asp / gossip / none", workers)).median_s for workers in (2, 256))
    assert many == pytest.approx(few, rel=0.02)
    assert many == pytest.approx(JOB.compute_s, rel=0.02)


def test_whoever_waits_for_neighbours_is_held_up_by_these() -> None:
    """However many there are."""
    few, many, all_of_them = (
        spread(with_noise(strategy, workers)).median_s
        for strategy, workers in (("d-psgd", 4), ("d-psgd", 256), ("ddp", 256))
    )
    assert many == pytest.approx(few, rel=0.02)
    assert many < all_of_them


def test_many_steps_between_two_meetings_even_out() -> None:
    every, seldom = (spread(with_noise(f"local_sgd(period={period})", 256)).median_s for period in (1, 16))
    assert every == pytest.approx(spread(with_noise("ddp", 256)).median_s, rel=0.02)
    excess_s = every - JOB.compute_s
    assert seldom - JOB.compute_s == pytest.approx(excess_s / 4, rel=0.2)


def test_without_noise_there_is_no_spread() -> None:
    assert simulate("ddp", JOB, hosts(4)).prediction.spread is None


def test_interference_is_part_of_what_varies() -> None:
    workload = job((1.0, 1.0, 1_000_000))
    network = Line(byte_s=1e-6)
    conditions = Conditions(noise_ratio=1e-6, interference_ratio=0.25)
    found = simulate("bsp / gossip / none", workload, hosts(4), network=network, conditions=conditions).prediction
    assert spread(found).median_s == pytest.approx(found.step_s, rel=1e-4)


def test_a_slow_class_counts_as_in_the_prediction() -> None:
    conditions = Conditions(noise_ratio=1e-6, slow={0: 3.0})
    for strategy in ("ddp", "asp / gossip / none"):
        found = simulate(strategy, JOB, hosts(4), network=FAST, conditions=conditions).prediction
        assert spread(found).median_s == pytest.approx(found.step_s, rel=1e-3)
