"""Policies on cases small enough to be worked out by hand, and laws that hold for every registered one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic.jobs.policies
from laconic.cluster import Cluster, Link
from laconic.errors import LaconicError, UnknownName
from laconic.jobs import POLICIES, Costs, Job, Outcome, Phase, parse_policy, run
from laconic.jobs.policies.contract import View
from laconic.jobs.policies.shares import Memory, SharePolicy, center

NOT_POLICIES = {"__init__", "contract", "ranked", "shares", "network_aware"}


def job(
    name: str, duration_s: float, *, arrival_s: float = 0.0, gpus: int = 1, steps_per_s: float = 1.0, **more
) -> Job:
    phase = Phase(until=1.0, work_per_s=1 / duration_s, steps_per_s=steps_per_s)
    return Job(name=name, arrival_s=arrival_s, gpus=gpus, phases=(phase,), **more)


def gpus(hosts: int, each: int = 1) -> Cluster:
    inside = Link(bandwidth_bps=1e11) if each > 1 else None
    return Cluster(links=(Link(bandwidth_bps=1e10),) * hosts, devices_per_host=each, inside=inside)


def ends(jobs: list[Job], cluster: Cluster, policy: str, costs: Costs | None = None) -> dict[str, float]:
    found = run(jobs, cluster, parse_policy(policy), costs or Costs(round_s=10.0), fidelity="throughput")
    return {one.name: float(end_s) for one, end_s in zip(found.jobs, found.finish_s, strict=True)}


def view(left_s: list[float], wanted: list[int], num_gpus: int, **more: object) -> View:
    count = len(left_s)
    values: dict[str, object] = {
        "now_s": 0.0,
        "num_gpus": num_gpus,
        "round_s": 10.0,
        "has_changed": True,
        "number": np.arange(count),
        "jobs": [],
        "gpus": np.array(wanted),
        "age_s": np.zeros(count),
        "left_s": np.array(left_s),
        "speed": np.ones(count),
        "steps_per_s": np.ones(count),
        "received_s": np.zeros(count),
        "done": np.zeros(count),
    }
    return View(**(values | more))  # type: ignore[arg-type]


def shares(policy: str, of: View) -> list[float]:
    method = parse_policy(policy)
    assert isinstance(method, SharePolicy)
    return method.shares(of, Memory()).tolist()


def test_every_policy_file_is_registered() -> None:
    folder = Path(laconic.jobs.policies.__file__).parent
    files = {f"laconic.jobs.policies.{path.stem}" for path in folder.glob("*.py") if path.stem not in NOT_POLICIES}
    assert files == {method.__module__ for method in POLICIES}
    for method in POLICIES:
        assert method.summary()
        assert all(method.setting_help().values()), method.name


def test_fifo_serves_in_order_and_srtf_the_shortest_first() -> None:
    jobs = [job("long", 30.0), job("middle", 20.0), job("short", 10.0)]
    assert ends(jobs, gpus(1), "fifo") == {"long": 30, "middle": 50, "short": 60}
    assert ends(jobs, gpus(1), "srtf") == {"short": 10, "middle": 30, "long": 60}


def test_srsf_counts_gpus() -> None:
    jobs = [job("wide", 20.0, gpus=2), job("narrow", 30.0)]
    assert ends(jobs, gpus(2), "srtf") == {"wide": 20, "narrow": 50}
    assert ends(jobs, gpus(2), "srsf") == {"narrow": 30, "wide": 50}


def test_srtf_takes_gpus_from_a_longer_job_and_a_start_costs_time() -> None:
    jobs = [job("long", 40.0), job("short", 5.0, arrival_s=15.0)]
    assert ends(jobs, gpus(1), "srtf") == {"short": 25, "long": 50}
    # long: starts 0-2, runs to 20; short: 20-22, runs to 27; long: 30-32, 22 s of work left, ends at 54.
    assert ends(jobs, gpus(1), "srtf", Costs(round_s=10.0, start_s=2.0)) == {"short": 27, "long": 54}


def test_las_lets_a_new_job_pass_one_that_has_had_its_share() -> None:
    jobs = [job("old", 60.0), job("new", 10.0, arrival_s=25.0)]
    assert ends(jobs, gpus(1), "las(threshold=20)") == {"new": 40, "old": 70}
    assert ends(jobs, gpus(1), "las(threshold=1000)") == {"old": 60, "new": 70}


def test_max_min_fairness_gives_every_job_the_same_gpu_time() -> None:
    assert shares("max_min_fairness", view([1.0] * 4, [1, 1, 2, 4], 2)) == pytest.approx([0.5, 0.5, 0.25, 0.125])
    jobs = [job("a", 40.0), job("b", 40.0)]
    found = ends(jobs, gpus(1), "max_min_fairness")
    assert sorted(found.values()) == [70, 80]


def test_max_sum_throughput_is_a_knapsack() -> None:
    of = view([1.0] * 4, [1, 2, 1, 1], 3, steps_per_s=np.array([5.0, 8.0, 1.0, 1.0]))
    # Steps per second and GPU: 5, 4, 1, 1.
    assert shares("max_sum_throughput", of) == pytest.approx([1, 1, 0, 0], abs=1e-7)
    of = view([1.0] * 3, [1, 1, 1], 2, steps_per_s=np.array([5.0, 1.0, 1.0]))
    assert shares("max_sum_throughput", of) == pytest.approx([1, 0.5, 0.5])
    # Who gets nothing is next in order of what running it would lose: 6 - 4, and 2 x 6 - 2.
    of = view([1.0] * 3, [1, 1, 2], 1, steps_per_s=np.array([6.0, 4.0, 2.0]))
    _, second, third = shares("max_sum_throughput", of)
    assert second == pytest.approx(third * 10 / 2)
    assert 0 < second < 1e-6


def test_min_total_duration_lets_all_end_together() -> None:
    left_s = np.array([1000.0, 2000.0, 3000.0, 2000.0])
    found = np.array(shares("min_total_duration", view(left_s.tolist(), [1, 1, 1, 2], 4)))
    assert found @ [1, 1, 1, 2] <= 4
    assert (left_s / found).max() <= 3000 * 1.06
    assert found[2] == pytest.approx(1.0, abs=0.06)


def test_finish_time_fairness_equalizes_what_jobs_lose() -> None:
    # Alike but for their age: the older one has lost more and gets more.
    of = view([100.0, 100.0], [1, 1], 1, age_s=np.array([50.0, 0.0]))
    older, newer = shares("finish_time_fairness", of)
    assert older + newer == pytest.approx(1.0, rel=1e-6)
    assert (50 + 100 / older) / 200 == pytest.approx((100 / newer) / 200, rel=1e-6)


def test_allox_never_takes_the_gpu_from_a_job_that_has_begun() -> None:
    jobs = [job("long", 100.0), job("middle", 20.0, arrival_s=5.0), job("short", 10.0, arrival_s=6.0)]
    assert ends(jobs, gpus(1), "allox(considered=1)") == {"long": 100, "short": 110, "middle": 130}
    # A fifth of two jobs is none, so that only the one that came first is matched with the machine.
    assert ends(jobs, gpus(1), "allox") == {"long": 100, "middle": 120, "short": 130}


def test_allox_leaves_the_machine_of_a_job_on_several_gpus_to_others() -> None:
    method, memory = parse_policy("allox(considered=1)"), Memory()
    assert isinstance(method, SharePolicy)
    of = view([100.0, 10.0, 50.0, 70.0], [1, 2, 1, 1], 2)
    assert method.shares(of, memory).tolist() == [0, 0.5, 1, 0]
    # One machine is left, for which the job on two GPUs is matched again.
    assert method.shares(of, memory).tolist() == [0, 0.5, 1, 0]
    later = view([100.0, 90.0, 50.0, 70.0], [1, 2, 1, 1], 2)
    assert method.shares(later, memory).tolist() == [0, 0.5, 1, 1]


def test_finish_time_fairness_counts_steps_that_fall_away_when_a_batch_grows_as_done() -> None:
    method, memory = parse_policy("finish_time_fairness"), Memory()
    assert isinstance(method, SharePolicy)
    before = view([100.0, 100.0], [1, 1], 1, steps_per_s=np.array([8.0, 8.0]))
    assert method.shares(before, memory) == pytest.approx([0.5, 0.5])
    # Twice the batch: half of the steps are left, at six instead of eight in a second.
    after = view([400 / 6, 100.0], [1, 1], 1, steps_per_s=np.array([6.0, 8.0]), age_s=np.array([10.0, 10.0]))
    grown, other = method.shares(after, memory)
    isolated = [400 / 4 + 2 * 400 / 6, 200]
    assert (10 + 400 / 6 / grown) / isolated[0] == pytest.approx((10 + 100 / other) / isolated[1], rel=1e-6)
    assert grown + other == pytest.approx(1.0, rel=1e-6)


def test_a_round_that_is_planned_ahead_does_not_see_later_ends() -> None:
    jobs = [job("a", 17.0), job("b", 10.0)]
    costs = Costs(round_s=10.0, ahead_s=4.0)
    # a ends at 17, after the round from 20 on was planned at 16: its GPU is idle until 30.
    assert ends(jobs, gpus(1), "fifo", costs) == pytest.approx({"a": 17, "b": 40})
    assert ends([job("a", 15.0), job("b", 10.0)], gpus(1), "fifo", costs) == pytest.approx({"a": 15, "b": 30})


def test_a_job_whose_batch_grows_stops_until_the_next_round() -> None:
    phases = (Phase(until=0.5, work_per_s=0.05, steps_per_s=1.0), Phase(until=1.0, work_per_s=0.1, steps_per_s=1.0))
    jobs = [Job(name="a", arrival_s=0.0, gpus=1, phases=phases)]
    # 2 s to start, 10 s at the first batch; from 20 on 2 s to start, 5 s at the second.
    costs = Costs(round_s=20.0, start_s=2.0, stops_to_grow=True)
    assert ends(jobs, gpus(1), "fifo", costs) == {"a": 27}
    assert ends(jobs, gpus(1), "fifo", Costs(round_s=20.0, start_s=2.0)) == {"a": 17}


def test_pollux_gives_idle_gpus_to_elastic_jobs_and_takes_them_back() -> None:
    alone = run([job("a", 100.0, max_gpus=4)], gpus(1, 4), parse_policy("pollux"), Costs(round_s=10.0))
    assert {stay.gpus for stay in alone.stays} == {4}
    assert alone.makespan_s < 60
    jobs = [job("a", 100.0, max_gpus=4), job("b", 20.0, arrival_s=1.0, gpus=3)]
    both = run(jobs, gpus(1, 4), parse_policy("pollux"), Costs(round_s=10.0))
    assert [stay.gpus for stay in both.stays if stay.job == 0] == [4, 1, 4]


@given(st.lists(st.tuples(st.floats(0, 0.99), st.integers(1, 8)), min_size=1, max_size=30), st.integers(1, 64))
def test_the_center_is_feasible_and_nothing_near_it_is_better(rows: list[tuple[float, int]], num_gpus: int) -> None:
    least, wanted = np.array([low for low, _ in rows]), np.array([count for _, count in rows])
    least *= min(1.0, 0.9 * num_gpus / max(1e-9, float(least @ wanted)))
    found = center(least, wanted, num_gpus)

    def barrier(x: np.ndarray) -> float:
        inner = np.concatenate([x - least, 1 - x, [num_gpus - wanted @ x]])
        return float(np.log(inner).sum()) if (inner > 0).all() else -np.inf

    best = barrier(found)
    assert np.isfinite(best)
    for place in range(len(rows)):
        for step in (-1e-3, 1e-3):
            other = found.copy()
            other[place] += step * (1 - least[place])
            assert barrier(other) <= best + 1e-9


def traces() -> st.SearchStrategy[list[Job]]:
    one = st.tuples(
        st.floats(1.0, 400.0),
        st.floats(0.0, 500.0),
        st.sampled_from([1, 1, 1, 2, 3, 4, 8]),
        st.floats(0.1, 100.0),
        st.booleans(),
    )
    return st.lists(one, min_size=1, max_size=25).map(
        lambda rows: [
            job(f"j{place}", long_s, arrival_s=comes_s, gpus=count, steps_per_s=speed, max_gpus=8 if elastic else 0)
            for place, (long_s, comes_s, count, speed, elastic) in enumerate(rows)
        ]
    )


def check_gpus(found: Outcome, cluster: Cluster) -> None:
    """No host ever gives away more GPUs than it has."""
    changes: list[tuple[float, int, int, int]] = []
    for stay in found.stays:
        assert sum(count for _, count in stay.placement) == stay.gpus
        for host, count in stay.placement:
            changes += [(stay.begin_s, 1, host, count), (stay.end_s, 0, host, -count)]
    used = [0] * cluster.num_hosts
    for _, _, host, count in sorted(changes):
        used[host] += count
        assert 0 <= used[host] <= cluster.devices_per_host


@pytest.mark.parametrize("policy", POLICIES.names())
@settings(max_examples=15, deadline=None)
@given(traces(), st.sampled_from(["pack", "first", "spread", "racks"]))
def test_every_job_ends_on_gpus_that_nobody_else_has(policy: str, jobs: list[Job], placement: str) -> None:
    cluster, costs = gpus(4, 2), Costs(round_s=60.0, start_s=5.0, checkpoint_s=2.0, migration_s=3.0, ahead_s=30.0)
    method = parse_policy(f"{policy}(placement={placement})")
    found = run(jobs, cluster, method, costs, fidelity="throughput")
    check_gpus(found, cluster)
    assert np.isfinite(found.finish_s).all()
    assert (found.fairness > 0).all()
    for number, one in enumerate(found.jobs):
        own = [stay for stay in found.stays if stay.job == number]
        worked_s = sum((stay.end_s - stay.begin_s) * method.speed(one, stay.gpus) for stay in own)
        assert worked_s >= one.duration_s - 1e-6, "no work is skipped"
        if not one.max_gpus:
            starts_s = sum(stay.end_s - stay.begin_s for stay in own) - one.duration_s
            assert 5 * len(own) - 1e-6 <= starts_s <= 10 * len(own) + 1e-6, "and none is done twice"
        assert own[0].begin_s >= one.arrival_s


def test_a_typo_names_the_nearest_policy() -> None:
    with pytest.raises(UnknownName, match='Did you mean "fifo"'):
        parse_policy("fifi")
    for text in ("las(queues=0)", "las(length=3)", "fifo / srtf", "las(3)", "fifo(placement=rakcs)", ""):
        with pytest.raises(LaconicError):
            parse_policy(text)
