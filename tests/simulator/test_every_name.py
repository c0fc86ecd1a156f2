"""Everything that is registered can be simulated: a method that cannot fails here when it is added."""

from __future__ import annotations

import math

import pytest

from laconic.cluster import Cluster, Link
from laconic.errors import AttachError
from laconic.simulator import Conditions, Prediction, simulate
from laconic.simulator.network.flow import FlowNetwork
from laconic.strategy import AXES, PRESETS, Strategy
from tests.simulator.jobs import hosts, job
from tests.strategy.generate import changed_wrappers, every_stack, variants, with_partners

JOB = job((0.002, 0.004, 40_000), (0.001, 0.002, 0), (0.003, 0.005, 400_000), (0.001, 0.003, 8_000))
FOUR = hosts(4, delay_s=1e-4)
TWO_HOSTS = Cluster(
    links=(Link(bandwidth_bps=8e9),) * 2, devices_per_host=2, inside=Link(bandwidth_bps=80e9, delay_s=1e-6)
)


def place_of(strategy: Strategy) -> Cluster:
    """Where the strategy is not refused: what tells hosts apart needs some."""
    text = str(strategy.architecture)
    return TWO_HOSTS if "hierarchical" in text or "between=" in text else FOUR


def check(found: Prediction, workers: int) -> None:
    assert math.isfinite(found.step_s)
    assert found.step_s >= JOB.compute_s * (1 - 1e-9), "nobody is faster than alone"
    assert found.samples_per_s == pytest.approx(workers * JOB.batch / found.step_s)
    rule = Strategy.parse(found.strategy).synchronization
    # Times are for the samples of all workers; some of them may be spare.
    counted = rule.num_first(workers) if rule.takes_first else workers
    assert found.compute_s == pytest.approx(JOB.compute_s * workers / counted)
    assert found.exposed_s >= 0
    assert 0 < found.efficiency <= 1
    assert found.wire_bytes >= 0
    assert all(0 <= share <= 1 for share in found.busy.values())
    assert sum(share for _, share in found.because) == pytest.approx(1)
    assert found.plans
    assert found.in_words().endswith(".")


@pytest.mark.parametrize("axis", AXES)
def test_every_variant_of_every_axis(axis: str) -> None:
    methods = variants(axis) + (changed_wrappers() if axis == "compression" else [])
    for method in methods:
        strategy = with_partners(method)
        check(simulate(strategy, JOB, place_of(strategy)).prediction, 4)


@pytest.mark.slow
def test_all_stacks_at_flow_level_with_a_straggler_noise_and_interference() -> None:
    conditions = Conditions(slow={1: 1.5}, noise_ratio=0.05, interference_ratio=0.2, optimizer_s=1e-4)
    networks = {cluster: FlowNetwork(cluster) for cluster in (FOUR, TWO_HOSTS)}
    for strategy in every_stack()[::3]:
        if "hosts=" in str(strategy.architecture):
            continue  # servers on hosts of their own have no place on this fabric
        place = place_of(strategy)
        found = simulate(strategy, JOB, place, network=networks[place], conditions=conditions).prediction
        assert math.isfinite(found.step_s)
        assert found.step_s >= JOB.compute_s
        assert found.spread is not None
        assert found.spread.low_s <= found.spread.median_s <= found.spread.high_s


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_with_one_worker_computes_only(name: str) -> None:
    found = simulate(name, JOB, FOUR, workers=1).prediction
    assert found.step_s == pytest.approx(JOB.compute_s)
    assert found.efficiency == pytest.approx(1)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_preset_with_few_workers(workers: int) -> None:
    for name in PRESETS:
        check(simulate(name, JOB, FOUR, workers=workers).prediction, workers)


def test_a_strategy_that_would_have_no_effect_is_refused_as_when_it_is_attached() -> None:
    with pytest.raises(AttachError, match="each of the 4 ranks has a host to itself"):
        simulate("bsp / all_reduce(algorithm=hierarchical)", JOB, FOUR)
