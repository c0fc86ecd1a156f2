"""Compute that is slower while something is in flight."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.simulator import Conditions, simulate
from laconic.simulator.interference import busy_until, still_busy, stretched
from laconic.simulator.simulation import Simulation
from tests.simulator.jobs import Line, hosts, job

moments = st.floats(0, 100)
intervals = st.lists(st.tuples(moments, st.floats(0, 20)), max_size=12)


def overlap_s(first: float, last: float, found: list[tuple[float, float]]) -> float:
    """How much of the time at least one interval lasted, moment by moment between all the moments there are."""
    marks = sorted({first, last, *(mark for begin, length in found for mark in (begin, begin + length))})
    return sum(
        right - left
        for left, right in pairwise(marks)
        if first <= left and right <= last and any(b <= left and right <= b + length for b, length in found)
    )


@given(found=intervals, first=moments, length=st.floats(0, 50))
def test_time_in_which_something_is_under_way(found: list[tuple[float, float]], first: float, length: float) -> None:
    begins = np.array([begin for begin, _ in found], dtype=np.float64)
    ends = np.array([begin + length for begin, length in found], dtype=np.float64)
    marks_s, busy_s = busy_until(begins, ends)
    between = np.interp(first + length, marks_s, busy_s) - np.interp(first, marks_s, busy_s)
    assert between == pytest.approx(overlap_s(first, first + length, found), abs=1e-9)


@given(found=intervals, start=moments, alone=st.floats(0, 50), ratio=st.floats(0, 0.95))
def test_a_task_lasts_until_its_work_is_done(found, start: float, alone: float, ratio: float) -> None:
    """duration = alone + ratio x (time of it in which something is in flight)."""
    begins = np.array([begin for begin, _ in found], dtype=np.float64)
    ends = np.array([begin + length for begin, length in found], dtype=np.float64)
    (took,) = stretched(np.array([start]), np.array([alone]), *busy_until(begins, ends), ratio)
    assert took == pytest.approx(alone + ratio * overlap_s(start, start + took, found), abs=1e-7)


def check_consistent(found: Simulation, ratio: float) -> None:
    """Every compute task of the outcome takes what it takes alone, and more for what is in flight meanwhile."""
    moving = [
        (float(found.outcome.end_s[task]) - label.moving_s, label.moving_s)
        for task, label in enumerate(found.task_graph.labels)
        if label.moving_s
    ]
    for task in found.task_graph.compute_tasks:
        start_s, end_s = float(found.outcome.start_s[task]), float(found.outcome.end_s[task])
        alone_s = float(found.graph.duration_s[task])
        assert end_s - start_s == pytest.approx(alone_s + ratio * overlap_s(start_s, end_s, moving), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("strategy", ["wfbp-a2a", "ddp", "dear", "d-psgd", "bytescheduler-a2a", "local_sgd(period=3)"])
def test_the_outcome_is_consistent_with_itself(strategy: str, ratio: float) -> None:
    workload = job(*((0.5, 1.0, 400_000 + 100_000 * (index % 4)) for index in range(8)))
    conditions = Conditions(interference_ratio=ratio)
    check_consistent(simulate(strategy, workload, hosts(4), network=Line(byte_s=1e-6), conditions=conditions), ratio)


def test_compute_beside_an_exchange_by_hand() -> None:
    """Gossip that is always in flight: compute has (1 - ratio) of its speed all the time."""
    workload = job((1.0, 1.0, 1_000_000))
    conditions = Conditions(interference_ratio=0.25)
    network = Line(byte_s=1e-5)
    found = simulate("bsp / gossip / none", workload, hosts(4), network=network, conditions=conditions).prediction
    assert found.step_s == pytest.approx(10.0)
    short = simulate(
        "bsp / gossip / none", workload, hosts(4), network=Line(byte_s=1e-6), conditions=conditions
    ).prediction
    # One second of each step is spent beside it, in which three quarters of a second of work are done.
    assert short.step_s == pytest.approx(2.25)
    after = simulate("bsp-a2a", workload, hosts(4), network=network, conditions=conditions).prediction
    assert after.step_s == pytest.approx(12.0), "nothing computes while it is in flight"


@given(found=intervals, moment=moments)
def test_for_how_long_something_goes_on_without_a_gap(found: list[tuple[float, float]], moment: float) -> None:
    found = [(begin, length) for begin, length in found if length > 1e-6] or [(200.0, 1.0)]
    begins = np.array([begin for begin, _ in found])
    ends = np.array([begin + length for begin, length in found])
    (left,) = still_busy(np.array([moment]), begins, ends)
    until = moment
    while reaching := [begin + length for begin, length in found if begin <= until < begin + length]:
        until = max(reaching)
    assert left == pytest.approx(until - moment, abs=1e-6)


class Launching(Line):
    """The same where an exchange waits up to a quarter of a second for a device that computes."""

    def passages(self, move, world_size, num_servers):
        return tuple(replace(one, launch_s=0.25) for one in super().passages(move, world_size, num_servers))


def test_an_exchange_waits_for_a_kernel_while_the_device_computes() -> None:
    """Two gradients, the second at the end of compute: only the first finds something that runs."""
    workload = job((0.0, 1.0, 400), (0.0, 1.0, 400))
    found = simulate("wfbp-a2a", workload, hosts(4), network=Launching(byte_s=1e-3))
    took = {
        round(float(found.outcome.end_s[task] - found.outcome.start_s[task]), 6)
        for task, label in enumerate(found.task_graph.labels)
        if label.kind == "exchange"
    }
    assert took == {0.4, 0.65}
    after = simulate("bsp-a2a", workload, hosts(4), network=Launching(byte_s=1e-3)).prediction
    assert after.step_s == pytest.approx(2.8), "nothing computes any more"


def test_latency_disturbs_nobody() -> None:
    workload = job((0.0, 1.0, 4), (0.0, 1.0, 4))
    network = Line(byte_s=0.0, latency_s=0.5)
    for ratio in (0.0, 0.5):
        found = simulate(
            "wfbp-a2a", workload, hosts(4), network=network, conditions=Conditions(interference_ratio=ratio)
        ).prediction
        assert found.step_s == pytest.approx(2.5)
