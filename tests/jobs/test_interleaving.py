"""Start times by which jobs take turns, by hand and against the flow-level simulator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cluster import Cluster, Link
from laconic.errors import UsageError
from laconic.jobs import Rhythm, interleave
from laconic.simulator.together import Tenant, simulate_together
from tests.simulator.jobs import RATE, job

SEQUENTIAL = "bsp / all_reduce / none / sequential"


@settings(max_examples=15, deadline=None)
@given(busy=st.lists(st.floats(0.05, 0.3), min_size=1, max_size=3), begin=st.floats(0.0, 0.6))
def test_jobs_with_one_period_take_turns_wherever_they_fit(busy: list[float], begin: float) -> None:
    """At most 0.9 of a period is wanted, and the rest is wide enough for what shifts are rounded to."""
    rhythms = [Rhythm(period_s=2.0, begin_s=2 * begin, busy_s=2 * share) for share in busy]
    found = interleave(rhythms)
    assert found.start_s[0] == 0
    spans = sorted(
        ((rhythm.begin_s + start_s) % 2.0, rhythm.busy_s)
        for rhythm, start_s in zip(rhythms, found.start_s, strict=True)
    )
    late = 2.0 / 720 * 2
    for (begins_s, lasts_s), (next_s, _) in zip(spans, [*spans[1:], (spans[0][0] + 2.0, 0.0)], strict=True):
        assert begins_s + lasts_s <= next_s + late
    assert found.excess < 0.02


def test_what_does_not_fit_is_told() -> None:
    full = Rhythm(period_s=1.0, begin_s=0.5, busy_s=0.5)
    assert interleave([full, full]).excess == 0
    # Three halves of a link that is there once.
    assert interleave([full] * 3).excess == pytest.approx(1 / 3)
    assert interleave([Rhythm(period_s=1.0, begin_s=0.5, busy_s=0.5, share=1 / 3)] * 3).excess == 0
    assert interleave([]).start_s == ()
    # One period is half of the other: both fit, one in the gaps of the other.
    twice = interleave([full, Rhythm(period_s=0.5, begin_s=0.0, busy_s=0.1)])
    assert twice.excess == pytest.approx(0.1 / 0.7, rel=0.05)
    for wrong in (
        {"period_s": 0.0, "begin_s": 0.0, "busy_s": 0.0},
        {"period_s": 1.0, "begin_s": 0.0, "busy_s": 1.5},
        {"period_s": 1.0, "begin_s": 0.0, "busy_s": 0.5, "share": 1.5},
    ):
        with pytest.raises(UsageError, match="busy_s between 0 and period_s"):
            Rhythm(**wrong)


def test_three_jobs_on_one_uplink_run_as_if_alone_if_they_begin_in_turn() -> None:
    """Each computes 20 ms and keeps the uplink busy for 10 ms; together they fill the step."""
    cluster = Cluster.in_racks(6, Link(bandwidth_bps=8 * RATE), racks=2, oversubscription=3)
    workload = job((0.0, 0.020, 10_000_000))
    shifts = interleave([Rhythm(period_s=0.030, begin_s=0.020, busy_s=0.010)] * 3).start_s
    assert sorted(shifts) == pytest.approx([0.0, 0.010, 0.020])

    def steps_s(starts: tuple[float, ...]) -> list[float]:
        tenants = [
            Tenant(strategy=SEQUENTIAL, workload=workload, devices=(number, 3 + number), start_s=start_s)
            for number, start_s in enumerate(starts)
        ]
        return [found.together_s for found in simulate_together(tenants, cluster)]

    assert steps_s((0.0, 0.0, 0.0)) == pytest.approx([0.050] * 3, rel=1e-3)
    assert steps_s(shifts) == pytest.approx([0.030] * 3, rel=1e-3)
    with pytest.raises(UsageError, match="job 1: start_s must be at least 0"):
        steps_s((0.0, -1.0, 0.0))
