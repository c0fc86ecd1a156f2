"""One plan for both executors: what is simulated is what the runtime would follow with the same times."""

from __future__ import annotations

import pytest

from laconic.architecture import AllReduce
from laconic.cluster import Cluster, Link
from laconic.core.timing import Timing
from laconic.simulator import simulate
from laconic.simulator.lowering.task_graph import Inputs, RankClass
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.planning import settled, timing
from laconic.strategy import Strategy
from tests.simulator.jobs import Line, hosts, job
from tests.strategy.generate import variants, with_partners

JOB = job(*((0.001, 0.002 + 0.001 * (index % 3), 4 * (1000 + 70_000 * (index % 5))) for index in range(20)))
NETWORK = Line(byte_s=2e-9, startup_s=3e-4, latency_s=2e-4)


def times() -> Timing:
    """What the runtime would measure: gradients from the first one on, and a line through 4 KiB and 32 MiB.

    The longest of the doubled sizes: 64 KiB x 2^9 is the first above 0.05 s here.
    """
    ready, now_s = [], 0.0
    for layer in reversed(JOB.layers):
        now_s += layer.backward_s
        ready.append(now_s - JOB.layers[-1].backward_s)
    large = next(65536 << power for power in range(10) if NETWORK.takes_s(65536 << power) >= 0.05 or power == 9)
    byte_s = (NETWORK.takes_s(large) - NETWORK.takes_s(4096)) / (large - 4096)
    return Timing(tuple(ready), NETWORK.takes_s(4096), byte_s)


@pytest.mark.parametrize("schedule", variants("scheduling"), ids=str)
def test_every_schedule_is_simulated_with_the_plan_the_runtime_makes(schedule) -> None:
    strategy = with_partners(schedule)
    found = simulate(strategy, JOB, hosts(4), network=NETWORK).prediction
    needed = times() if strategy.scheduling.needs_timing else None
    possible = [
        strategy.plan(JOB.tensors, 4, timing=needed, candidate=number)
        for number in range(strategy.scheduling.candidates)
    ]
    assert len(found.plans) == 1
    if needed is None:
        assert found.plans[0] in possible
    else:
        # Times are equal but for rounding, so what they lead to is.
        assert [bucket.tensors for bucket in found.plans[0].buckets] == [
            bucket.tensors for bucket in possible[0].buckets
        ]
    assert sum(bucket.nbytes for bucket in found.plans[0].buckets) == JOB.gradient_bytes


def test_times_are_those_the_runtime_measures() -> None:
    inputs = Inputs(
        strategy=Strategy(),
        workload=JOB,
        world_size=4,
        network=NETWORK,
        classes=(RankClass(4),),
        codec=None,
    )
    found, expected = timing(inputs), times()
    assert found.ready_s == pytest.approx(expected.ready_s)
    assert (found.startup_s, found.byte_s) == pytest.approx((expected.startup_s, expected.byte_s))
    assert found.ready_s[0] == 0
    assert list(found.ready_s) == sorted(found.ready_s)


@pytest.mark.parametrize("synchronization", variants("synchronization"), ids=str)
def test_every_part_of_the_model_has_the_plan_the_runtime_makes(synchronization) -> None:
    strategy = with_partners(synchronization)
    found = simulate(strategy, JOB, hosts(4), network=NETWORK).prediction
    if not strategy.exchanges_gradients():
        assert list(found.plans) == strategy.plans(JOB.tensors, 4)
    parts = synchronization.num_parts + len(synchronization.moments)
    assert len(found.plans) == parts


def test_wire_bytes_are_those_the_strategy_predicts() -> None:
    for text in ("ddp", "powersgd", "bsp-ps", "diloco", "streaming-diloco-int4", "d-psgd", "ad-psgd", "ssp"):
        strategy = Strategy.parse(text)
        assert simulate(strategy, JOB, hosts(4)).prediction.wire_bytes == strategy.wire_bytes_per_step(JOB.tensors, 4)


BOXES = Cluster(links=(Link(bandwidth_bps=8e9, delay_s=1e-5),) * 4, devices_per_host=4, inside=Link(bandwidth_bps=8e11))


def test_algorithms_know_the_hosts() -> None:
    hosts_of_four = tuple(tuple(range(first, first + 4)) for first in range(0, 16, 4))
    network = AnalyticNetwork(BOXES)
    strategy = settled(Strategy(architecture=AllReduce(algorithm="hierarchical")), hosts_of_four, network, lambda: ())
    assert isinstance(strategy.architecture, AllReduce)
    assert strategy.architecture.hosts == hosts_of_four
    plain = Strategy()
    assert settled(plain, hosts_of_four, network, lambda: ()) is plain


def test_auto_takes_what_is_clearly_fastest_for_a_size() -> None:
    """On hosts whose devices share a link, a sum inside them first; for what is small, few steps."""
    found = simulate("bsp / all_reduce(algorithm=auto) / none / sequential", JOB, BOXES).prediction
    native, hierarchical, tree = (
        simulate(f"bsp / all_reduce(algorithm={name}) / none / sequential", JOB, BOXES).prediction.step_s
        for name in ("native", "hierarchical", "tree")
    )
    assert found.step_s <= min(native, hierarchical, tree) * (1 + 1e-9)
    assert "all-reduce" in found.because[1][0]


@pytest.mark.parametrize("algorithm", ["native", "ring", "torus2d", "hierarchical", "halving_doubling"])
def test_bytes_of_large_worlds_are_counted_by_formula(algorithm: str) -> None:
    """Beyond 512 ranks; for a power of two all of these send what a ring does."""
    cluster = Cluster(
        links=(Link(bandwidth_bps=8e9),) * 256, devices_per_host=4, inside=Link(bandwidth_bps=8e11, delay_s=1e-6)
    )
    small = job((0.01, 0.02, 1 << 20))
    strategy = f"bsp / all_reduce(algorithm={algorithm}) / none / sequential"
    found = simulate(strategy, small, cluster, workers=1024).prediction
    assert found.wire_bytes == pytest.approx(2 * 1023 / 1024 * (1 << 20), rel=1e-4)


@pytest.mark.parametrize("compression", ["fp16", "int8", "int8(route=scatter)"])
def test_bytes_between_many_hosts_are_those_of_their_first_ranks(compression: str) -> None:
    """The same by formula as by rows, which are few enough for a world just below the limit."""
    cluster = Cluster(links=(Link(bandwidth_bps=8e9),) * 300, devices_per_host=2, inside=Link(bandwidth_bps=8e11))
    strategy = f"bsp / all_reduce(algorithm=hierarchical, compress=between_hosts) / {compression} / sequential"
    small = job((0.01, 0.02, 1 << 20))
    by_rows, by_formula = (
        simulate(strategy, small, cluster, workers=size).prediction.wire_bytes for size in (512, 520)
    )
    assert by_formula == pytest.approx(by_rows, rel=0.02)
