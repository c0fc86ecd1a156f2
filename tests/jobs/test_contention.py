"""What shared links do to jobs: by hand, against the flow-level simulator, and where jobs go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cluster import Cluster, Link, Racks
from laconic.jobs import Costs, Job, Phase, Traffic, parse_policy, run
from laconic.jobs.contention import HEAD, TAIL, Links, Options, shared
from laconic.jobs.pool import PLACEMENT_RULES, GpuPool
from laconic.simulator.together import Tenant, simulate_together
from laconic.workload import Layer, TensorShape, Workload

BYTES_PER_S = 1.25e9


def switch(hosts: int) -> Cluster:
    return Cluster(links=(Link(bandwidth_bps=1e10),) * hosts)


def racks(each: int = 4, count: int = 2) -> Cluster:
    """Racks of hosts with 10 Gbit/s behind one uplink of 10 Gbit/s."""
    topology = Racks(sizes=(each,) * count, uplinks=(Link(bandwidth_bps=1e10),) * count)
    return Cluster(links=(Link(bandwidth_bps=1e10),) * (each * count), topology=topology)


def on(*hosts: int) -> tuple[tuple[int, int], ...]:
    return tuple((host, 1) for host in hosts)


def test_a_job_alone_waits_for_its_own_bytes() -> None:
    # Two hosts: each link carries the gradients once, 2 (h - 1) / h = 1.
    found = shared(Links(switch(2)), [on(0, 1)], np.array([0.3]), np.array([BYTES_PER_S]), Options.plain(1))
    assert found.step_s[0] == pytest.approx(HEAD * 0.3 + 1.0, rel=1e-6)
    hidden = shared(Links(switch(2)), [on(0, 1)], np.array([0.3]), np.array([0.1 * BYTES_PER_S]), Options.plain(1))
    assert hidden.step_s[0] == pytest.approx(0.3 + TAIL * 0.1, rel=1e-6)
    assert hidden.link_load.max() == pytest.approx(0.1 / 0.31, rel=1e-6)


def test_jobs_that_only_communicate_share_a_link_evenly() -> None:
    links, placements = Links(racks()), [on(0, 4), on(1, 5), on(2, 6)]
    found = shared(links, placements, np.full(3, 1e-6), np.full(3, BYTES_PER_S), Options.plain(3))
    assert found.step_s == pytest.approx([3.0] * 3, rel=0.01)
    assert found.link_load.max() == pytest.approx(1.0, rel=0.01)


def test_jobs_that_take_turns_do_not_slow_each_other_down_until_the_link_is_full() -> None:
    links, placements = Links(racks()), [on(0, 4), on(1, 5)]
    compute_s, nbytes = np.full(2, 1.0), np.full(2, 0.45 * BYTES_PER_S)
    alone = shared(links, placements[:1], compute_s[:1], nbytes[:1], Options.plain(1)).step_s[0]
    unmanaged = shared(links, placements, compute_s, nbytes, Options.plain(2)).step_s
    in_turn = shared(links, placements, compute_s, nbytes, Options.plain(2), interleaved=True).step_s
    assert in_turn == pytest.approx([alone] * 2, rel=1e-6)
    assert (unmanaged >= in_turn).all()
    full = shared(links, placements, compute_s, 4 * nbytes, Options.plain(2), interleaved=True)
    assert full.step_s == pytest.approx([3.6] * 2, rel=0.02)
    other_periods = np.array([1.0, 1.37])
    heavy = 1.5 * nbytes
    assert shared(links, placements, other_periods, heavy, Options.plain(2), interleaved=True).step_s == pytest.approx(
        shared(links, placements, other_periods, heavy, Options.plain(2)).step_s
    )


def test_a_strategy_is_chosen_for_the_load() -> None:
    # A quarter of the bytes for 20% more steps: worth it only if another job uses the link.
    options = Options(np.array([[1.0, 0.25]] * 2), np.array([[1.0, 1.2]] * 2), np.zeros((2, 2)))
    compute_s, nbytes, links = np.full(2, 1.0), np.full(2, 0.7 * BYTES_PER_S), Links(racks())
    alone = shared(
        links,
        [on(0, 4)],
        compute_s[:1],
        nbytes[:1],
        Options(*(a[:1] for a in (options.bytes_ratio, options.steps_ratio, options.codec_s))),
    )
    assert alone.option.tolist() == [0]
    both = shared(links, [on(0, 4), on(1, 5)], compute_s, nbytes, options)
    assert 1 in both.option.tolist()


def workload(compute_s: float, megabytes: int) -> Workload:
    layers = tuple(
        Layer(
            name=f"l{place}",
            forward_s=compute_s / 3 / 10,
            backward_s=2 * compute_s / 3 / 10,
            tensors=(TensorShape(name=f"l{place}.w", shape=(megabytes * 250_000 // 10,)),),
        )
        for place in range(10)
    )
    return Workload(name="even", batch=1, layers=layers, source="Made up for tests.")


@pytest.mark.parametrize(
    ("first", "second"), [((0.1, 60), (0.1, 60)), ((0.2, 100), (0.05, 30)), ((0.3, 40), (0.3, 40))]
)
def test_the_fixed_point_agrees_with_the_flow_level_simulator(
    first: tuple[float, int], second: tuple[float, int]
) -> None:
    cluster, jobs = racks(2), [first, second]
    strategy = "bsp / all_reduce(algorithm=ring) / none / wfbp"
    tenants = [
        Tenant(strategy=strategy, workload=workload(*size), devices=devices)
        for size, devices in zip(jobs, ((0, 2), (1, 3)), strict=True)
    ]
    exact = [found.together_s for found in simulate_together(tenants, cluster)]
    found = shared(
        Links(cluster),
        [on(0, 2), on(1, 3)],
        np.array([size[0] for size in jobs]),
        np.array([1e6 * size[1] for size in jobs]),
        Options.plain(2),
    )
    assert found.step_s == pytest.approx(exact, rel=0.25)


@given(st.lists(st.integers(1, 10), max_size=20), st.sampled_from(PLACEMENT_RULES), st.randoms())
def test_a_pool_gives_every_gpu_once(wanted: list[int], rule: str, random) -> None:
    pool = GpuPool(6, 4, (0, 0, 0, 1, 1, 1))
    held = []
    for count in wanted:
        if count > pool.num_free and held:
            pool.give_back(held.pop(random.randrange(len(held))))
        if count <= pool.num_free:
            held.append(pool.take(count, rule))  # type: ignore[arg-type]
            assert sum(gpus for _, gpus in held[-1]) == count
        used = np.zeros(6, dtype=int)
        for placement in held:
            for host, gpus in placement:
                used[host] += gpus
        assert used.max() <= 4
        assert pool.num_free == 24 - used.sum()


def test_where_jobs_go() -> None:
    def placed(rule: str, *counts: int) -> list[tuple[tuple[int, int], ...]]:
        pool = GpuPool(4, 4, (0, 0, 1, 1))
        return [pool.take(count, rule) for count in counts]  # type: ignore[arg-type]

    assert placed("first", 3, 2) == [((0, 3),), ((0, 1), (1, 1))]
    assert placed("pack", 3, 2, 1) == [((0, 3),), ((1, 2),), ((0, 1),)]
    assert placed("spread", 3, 2) == [((0, 1), (1, 1), (2, 1)), ((0, 1), (3, 1))]
    assert placed("racks", 3, 6) == [((0, 3),), ((2, 4), (3, 2))]
    assert placed("pack", 3, 6) == [((0, 3),), ((1, 4), (2, 2))]


def test_a_policy_that_knows_the_racks_ends_sooner() -> None:
    phase = Phase(until=1.0, work_per_s=1 / 600, steps_per_s=10.0)
    jobs = [
        Job(name=f"j{place}", arrival_s=0.0, gpus=4, phases=(phase,), traffic=Traffic(gradient_bytes=1e8))
        for place in range(4)
    ]
    costs, cluster = Costs(round_s=60.0), replace(racks(2), devices_per_host=2, inside=Link(bandwidth_bps=1e11))
    found = {
        policy: run(jobs, cluster, parse_policy(policy), costs).average_completion_s
        for policy in ("srtf(placement=spread)", "rack_aware", "cassini", "strategy_aware")
    }
    assert found["rack_aware"] < 0.9 * found["srtf(placement=spread)"]
    assert found["cassini"] <= found["rack_aware"]
    assert found["strategy_aware"] < found["cassini"]


def heavy(name: str, duration_s: float, gpus: int, arrival_s: float = 0.0, strategy: str = "ddp") -> Job:
    """Ten steps per second, 100 MB of gradients each."""
    phase = Phase(until=1.0, work_per_s=1 / duration_s, steps_per_s=10.0)
    traffic = Traffic(gradient_bytes=1e8, strategy=strategy)
    return Job(name=name, arrival_s=arrival_s, gpus=gpus, phases=(phase,), traffic=traffic)


@pytest.mark.parametrize(("policy", "moves"), [("rack_aware", True), ("srtf", False)])
def test_a_job_that_was_cut_in_two_moves_together_when_there_is_room(policy: str, moves: bool) -> None:
    # Two jobs leave one GPU free on each host when the third comes; then one of them ends.
    jobs = [heavy("a", 9000, 2), heavy("y", 200, 2), heavy("z", 1000, 2, arrival_s=60)]
    cluster = replace(switch(2), devices_per_host=3, inside=Link(bandwidth_bps=1e11))
    found = run(jobs, cluster, parse_policy(policy), Costs(round_s=60.0))
    hosts = [len(stay.placement) for stay in found.stays if stay.job == 2]
    assert hosts == ([2, 1] if moves else [2])


@pytest.mark.parametrize(
    ("policy", "duration_s", "moves"),
    [("rack_aware", 3000, True), ("rack_aware", 30, False), ("srsf", 3000, False)],
)
def test_a_job_on_one_gpu_moves_out_of_the_way_if_that_pays_off(policy: str, duration_s: float, moves: bool) -> None:
    # When the short jobs have ended, the long ones hold one GPU of each host.
    jobs = [heavy("a", 4000, 1), heavy("x", 10, 1), heavy("b", 4000, 1), heavy("y", 10, 1)]
    jobs.append(heavy("z", duration_s, 2, arrival_s=30))
    cluster = replace(switch(2), devices_per_host=2, inside=Link(bandwidth_bps=1e11))
    found = run(jobs, cluster, parse_policy(policy), Costs(round_s=20.0, start_s=5.0))
    names = [found.jobs[stay.job].name for stay in found.stays]
    hosts = [len(stay.placement) for stay, name in zip(found.stays, names, strict=True) if name == "z"]
    assert hosts == ([1] if moves else [2])
    assert sum(name in "ab" for name in names) == (3 if moves else 2)


def test_a_job_uses_its_own_strategy_unless_the_policy_chooses() -> None:
    jobs = [heavy("plain", 600, 2), heavy("coded", 600, 2, strategy="bsp / all_reduce / int8")]
    own = run(jobs, racks(1, 4), parse_policy("fifo"), Costs(round_s=60.0))
    ends = dict(zip((job.name for job in own.jobs), own.finish_s, strict=True))
    assert ends["coded"] < ends["plain"]
    assert set(own.strategy_seconds()) == {"ddp", "bsp / all_reduce / int8"}
    chosen = run(jobs, racks(1, 4), parse_policy("strategy_aware"), Costs(round_s=60.0))
    assert "ddp" not in chosen.strategy_seconds()
