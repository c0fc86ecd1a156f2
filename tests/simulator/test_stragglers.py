"""Workers that differ: who waits for whom, and how long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from laconic.cluster import Cluster, Link
from laconic.errors import AttachError
from laconic.simulator import Conditions, simulate
from tests.simulator.jobs import RATE, Line, hosts, job

JOB = job((0.01, 0.02, 4_000_000), (0.01, 0.02, 4_000_000))
FAST = Line(byte_s=1e-15)
"""A network that takes no time."""


@pytest.mark.parametrize("factor", [1.1, 2.0, 7.0])
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "wfbp-a2a",
        "bytescheduler-a2a",
        "dear",
        "bsp-ps",
        "d-psgd",
        "sgp",
        "local_sgd(period=4)",
        "streaming_diloco(period=4, fragments=2, overlap=1)",
    ],
)
def test_where_all_wait_for_all_a_slow_worker_slows_everybody(strategy: str, factor: float) -> None:
    found = simulate(strategy, JOB, hosts(4), network=FAST, conditions=Conditions(slow={2: factor})).prediction
    assert found.step_s == pytest.approx(factor * JOB.compute_s, rel=1e-4)
    assert found.compute_s == pytest.approx(factor * JOB.compute_s)
    assert found.samples_per_s == pytest.approx(4 * JOB.batch / (factor * JOB.compute_s), rel=1e-4)


def test_a_slow_worker_waits_less_for_the_network_than_the_others() -> None:
    """Its own gradients come late, and only what is exchanged after that is waited for."""
    conditions = Conditions(slow={0: 2.0})
    workload = job((1.0, 1.0, 2_000_000), (1.0, 1.0, 2_000_000))
    found = simulate("wfbp-a2a", workload, hosts(4), network=Line(byte_s=1e-6), conditions=conditions).prediction
    # The slow one: forward 4 s, backward until 6 and 8 s; on the link 6 - 8 and 8 - 10 s.
    assert found.step_s == pytest.approx(10.0)


@pytest.mark.parametrize("factor", [1.05, 2.0, 10.0])
def test_without_clocks_the_others_keep_their_speed(factor: float) -> None:
    nbytes = JOB.gradient_bytes
    found = simulate("asp / parameter_server / none", JOB, hosts(4), conditions=Conditions(slow={0: factor})).prediction
    # Everybody's bytes go over its own link, at its own time: parts of the model that the others hold, there and back.
    exchange_s = 2 * 3 / 4 * nbytes / RATE
    alone = [JOB.compute_s + exchange_s] * 3 + [factor * JOB.compute_s + exchange_s]
    fastest = JOB.batch * sum(1 / step_s for step_s in alone)
    # They meet now and then, which takes a little longer.
    assert 0.9 * fastest < found.samples_per_s <= fastest * 1.001
    assert found.samples_per_s * found.step_s == pytest.approx(4 * JOB.batch)
    in_pairs = simulate("asp / gossip / none", JOB, hosts(4), conditions=Conditions(slow={0: factor})).prediction
    assert in_pairs.samples_per_s == pytest.approx(JOB.batch * (3 + 1 / factor) / JOB.compute_s, rel=1e-3)
    assert in_pairs.efficiency == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("factor", [1.05, 2.0, 10.0])
@pytest.mark.parametrize("staleness", [0, 1, 3, 50])
def test_with_clocks_the_others_are_held_back_in_the_end(staleness: int, factor: float) -> None:
    """However many steps the fastest may be ahead, at some time they are; then each of theirs waits for one of its."""
    strategy = f"ssp(staleness={staleness}) / parameter_server / none"
    found = simulate(strategy, JOB, hosts(4), conditions=Conditions(slow={0: factor})).prediction
    exchange_s = 2 * 3 / 4 * JOB.gradient_bytes / RATE
    slowest_s = factor * JOB.compute_s + exchange_s
    assert slowest_s * 0.999 <= found.step_s <= slowest_s + exchange_s


@pytest.mark.parametrize("factor", [1.05, 2.0, 10.0])
@pytest.mark.parametrize(("spare", "slow"), [(1, {0: 1.0}), (1, {2: 1.0}), (2, {0: 1.0, 3: 2.0})])
def test_no_step_waits_for_spare_workers_and_their_samples_do_not_count(
    spare: int, slow: dict[int, float], factor: float
) -> None:
    strategy = f"backup(spare={spare}) / parameter_server(shards=1) / none"
    conditions = Conditions(slow={rank: factor * more for rank, more in slow.items()})
    found = simulate(strategy, JOB, hosts(4), network=FAST, conditions=conditions).prediction
    assert found.samples_per_s == pytest.approx((4 - spare) * JOB.batch / JOB.compute_s, rel=1e-4)
    assert found.efficiency == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("factor", [1.05, 2.0, 10.0])
def test_with_more_slow_workers_than_spare_ones_all_wait_for_the_fastest_of_them(factor: float) -> None:
    conditions = Conditions(slow={0: factor, 1: 3 * factor})
    found = simulate("backup", JOB, hosts(4), network=FAST, conditions=conditions).prediction
    assert found.samples_per_s == pytest.approx(3 * JOB.batch / (factor * JOB.compute_s), rel=1e-4)
    assert found.compute_s == pytest.approx(4 / 3 * factor * JOB.compute_s)


def test_one_server_receives_whole_gradients_before_it_answers() -> None:
    """Its link carries the gradients of the three other hosts, then three times the parameters."""
    found = simulate("backup / parameter_server(shards=1) / none / wfbp", JOB, hosts(4)).prediction
    update_s = JOB.compute_s + 2 * 3 * JOB.gradient_bytes / RATE
    assert found.step_s == pytest.approx(4 / 3 * update_s, rel=0.02)


def test_the_slowest_of_random_steps_is_not_waited_for() -> None:
    """The mean of the third of four draws is below that of the fourth."""
    conditions = Conditions(noise_ratio=0.3, seed=3)
    spreads = [
        simulate(strategy, JOB, hosts(4), network=FAST, conditions=conditions).prediction.spread
        for strategy in ("bsp-ps", "backup")
    ]
    assert spreads[0] is not None
    assert spreads[1] is not None
    draws = np.sort(np.random.default_rng(1).lognormal(-np.log1p(0.09) / 2, np.log1p(0.09) ** 0.5, (100_000, 4)))
    for spread, place, share in ((spreads[0], 3, 1.0), (spreads[1], 2, 3 / 4)):
        assert spread.median_s * share == pytest.approx(np.median(draws[:, place]) * JOB.compute_s, rel=0.05)


def test_backup_needs_more_workers_than_spare_ones() -> None:
    with pytest.raises(AttachError, match=r"backup.spare must be < the number of workers \(4\), got 4"):
        simulate("backup(spare=4)", JOB, hosts(4))


def clocks(staleness: int, factor: float, network: Line) -> tuple[list[list[float]], list[list[float]]]:
    """When the pushes of each class arrive, and when its steps end; by class and step."""
    found = simulate(
        f"ssp(staleness={staleness}) / parameter_server / none",
        JOB,
        hosts(4),
        network=network,
        conditions=Conditions(slow={0: factor}),
    )
    ends = [[float(found.outcome.end_s[step[number]]) for step in found.task_graph.step_ends] for number in (0, 1)]
    arrived: list[list[float]] = [[], []]
    owners = {}
    for task, label in enumerate(found.task_graph.labels):
        if label.kind == "backward":
            owners[label.step, label.of] = float(found.outcome.end_s[task])
    for (step, number), end_s in sorted(owners.items()):
        assert step == len(arrived[number])
        arrived[number].append(end_s)
    return arrived, ends


@pytest.mark.parametrize("staleness", [1, 3])
def test_the_fastest_never_leads_by_more_than_it_may(staleness: int) -> None:
    """A step ends when the slowest has pushed all but `staleness` of as many, and not before; the simulated steps begin
    where the fastest are as far ahead as they may be."""
    arrived, ends = clocks(staleness, 2.0, FAST)
    for step, end_s in enumerate(ends[0]):
        fast_clock = step + 1 + staleness
        slow_clock = sum(1 for time_s in arrived[1] if time_s <= end_s + 1e-9)
        assert fast_clock - slow_clock <= staleness


def test_speeds_of_hosts_are_those_of_their_ranks() -> None:
    cluster = replace(hosts(4), speeds=(1.0, 0.5, 1.0, 2.0))
    slow = Conditions(slow={1: 2.0, 3: 0.5})
    assert simulate("ddp", JOB, cluster).prediction == replace(
        simulate("ddp", JOB, hosts(4), conditions=slow).prediction, cluster=cluster.describe()
    )
    boxes = Cluster(
        links=(Link(bandwidth_bps=8 * RATE),) * 2,
        devices_per_host=2,
        inside=Link(bandwidth_bps=80 * RATE),
        speeds=(1.0, 0.25),
    )
    found = simulate("ddp", JOB, boxes, conditions=Conditions(slow={0: 3.0}))
    classes = found.task_graph.inputs.classes
    assert [(ranks.size, ranks.slowdown) for ranks in classes] == [(1, 1.0), (1, 3.0), (2, 4.0)]


def test_equal_hosts_listed_one_by_one_are_folded_like_a_uniform_cluster() -> None:
    link = Link(bandwidth_bps=8 * RATE, delay_s=1e-4)
    listed = Cluster(links=tuple(Link(bandwidth_bps=8 * RATE, delay_s=1e-4) for _ in range(16)), speeds=(1.0,) * 16)
    for strategy in ("ddp", "dear", "ssp", "d-psgd", "bsp-ps"):
        found = simulate(strategy, JOB, listed)
        assert found.prediction == simulate(strategy, JOB, Cluster.uniform(16, link)).prediction
        assert len(found.task_graph.inputs.classes) == 1


def test_plans_are_made_from_the_times_of_rank_0() -> None:
    """As in the runtime, where rank 0 says when gradients are ready."""
    workload = job(*((0.001, 0.002, 400_000),) * 12)
    network = Line(byte_s=1e-9, startup_s=5e-3)
    first, other = (
        simulate(
            "mg-wfbp", workload, hosts(4), network=network, conditions=Conditions(slow={rank: 8.0})
        ).prediction.plans
        for rank in (0, 3)
    )
    usual = simulate("mg-wfbp", workload, hosts(4), network=network).prediction.plans
    assert other == usual
    assert len(first[0].buckets) > len(usual[0].buckets), "gradients that come slowly are worth sending apart"
