"""Measured curves: what lies between and beyond the sizes, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cluster import Curve, Estimate, Measured
from laconic.errors import UsageError

CURVE = Curve(
    kind="all_reduce", world_size=4, sizes=(1000, 3000, 11_000), seconds=(0.002, 0.003, 0.007), further=(0.001, 0.0018)
)


def test_between_sizes_and_beyond_them() -> None:
    assert CURVE.estimate(1000) == (0.002, True)
    assert CURVE.estimate(2000) == pytest.approx((0.0025, True))
    assert CURVE.estimate(7000) == pytest.approx((0.005, True))
    assert CURVE.estimate(11_000) == (0.007, True)
    # Beyond the last, 4 ms per 8000 bytes as between the last two.
    assert CURVE.estimate(19_000) == pytest.approx((0.011, False))
    # Below the first only start-up counts, and that was measured.
    assert CURVE.estimate(4) == (0.002, True)
    assert CURVE.startup_s == pytest.approx(0.0015)  # 1 ms per 2000 bytes, back to none
    assert CURVE.plateau_bytes_per_s == pytest.approx(2e6)


def test_start_up_that_goes_on_beside_others_bytes() -> None:
    """One more adds the longer of 5 ms of start-up and what its bytes take, 1 ms per thousand."""
    curve = Curve(
        kind="all_reduce",
        world_size=4,
        sizes=(100, 1000, 10_000, 20_000),
        seconds=(0.0071, 0.008, 0.017, 0.027),
        further=(0.005, 0.005, 0.01),
    )
    assert curve.overlaps
    assert curve.issue_s == pytest.approx(0.005)
    assert curve.startup_s == pytest.approx(0.007)
    assert curve.moving_s(5000) == pytest.approx(0.005)


def test_start_up_that_nothing_goes_on_beside() -> None:
    """One more adds 5 ms and what its bytes take."""
    curve = Curve(
        kind="all_reduce",
        world_size=4,
        sizes=(100, 1000, 10_000, 20_000),
        seconds=(0.0071, 0.008, 0.017, 0.027),
        further=(0.0051, 0.006, 0.015),
    )
    assert not curve.overlaps
    assert curve.issue_s == pytest.approx(0.005)


def test_start_up_of_which_nothing_was_measured() -> None:
    unknown = Curve(kind="send", world_size=2, sizes=(1000, 3000), seconds=(0.002, 0.004))
    assert unknown.issue_s == 0.0
    assert not unknown.overlaps
    assert unknown.moving_s(3000) == pytest.approx(0.003)  # without its start-up of 1 ms


def test_a_curve_that_begins_late_does_not_know_small_sizes() -> None:
    late = Curve(kind="send", world_size=2, sizes=(10**6, 2 * 10**6), seconds=(1.0, 2.0))
    assert late.estimate(1000) == Estimate(1.0, False)
    assert late.estimate(10**6).inside
    one = Curve(kind="send", world_size=2, sizes=(1024,), seconds=(0.5,))
    assert one.startup_s == 0.5
    assert one.estimate(2048) == (1.0, False)


def test_times_that_do_not_grow_never_make_more_bytes_faster() -> None:
    noisy = Curve(kind="send", world_size=2, sizes=(1000, 2000, 4000), seconds=(0.003, 0.002, 0.002))
    assert noisy.startup_s == 0.003
    assert noisy.estimate(8000).seconds == pytest.approx(0.002 + 4000 * 0.002 / 4000)
    assert noisy.plateau_bytes_per_s == pytest.approx(2e6)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_an_estimate_grows_where_times_grew(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert CURVE.estimate(low).seconds <= CURVE.estimate(high).seconds


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all_reduce", 1500), ("all_reduce(ring)", 1500), ("all_gather", 3000), ("all_to_all", 750), ("send", 1000)],
)
def test_bytes_a_rank_sends(kind: str, sent: int) -> None:
    assert Curve(kind=kind, world_size=4, sizes=(1,), seconds=(1,)).sent_bytes(1000) == sent


def test_looking_curves_up() -> None:
    eight = Curve(kind="all_reduce", world_size=8, sizes=(1000,), seconds=(0.1,))
    ring = Curve(kind="all_reduce(ring)", world_size=4, sizes=(1000,), seconds=(0.2,))
    measured = Measured(curves=(CURVE, eight, ring))
    assert measured.curve("all_reduce", 4) is CURVE
    assert measured.curve("all_reduce") is eight
    assert measured.curve("all_reduce", 16) is None
    assert measured.curve("all_gather") is None
    assert measured.seconds("all_reduce(ring)", 1000) == (0.2, True)
    assert measured.seconds("all_reduce", 3000, 4) == (0.003, True)
    with pytest.raises(UsageError, match=r"send among 4 ranks was not measured. Measured: all_reduce among 4, all_red"):
        measured.seconds("send", 10, 4)
    with pytest.raises(UsageError, match=r'no kind "allreduce". Did you mean "all_reduce"\?'):
        measured.seconds("allreduce", 10)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "all_gather(ring)"}, "there is no kind"),
        ({"kind": "all_reduce()"}, "there is no kind"),
        ({"world_size": 1}, "world_size must be a whole number from 2"),
        ({"sizes": (2, 1)}, "sizes must ascend"),
        ({"sizes": (1, 2, 3)}, "3 sizes but 2 seconds"),
        ({"sizes": (0, 1)}, "sizes[0] must be a whole number from 1"),
        ({"sizes": ()}, "sizes must be a list"),
        ({"seconds": (0.0, 1.0)}, "seconds must be > 0"),
        ({"seconds": (float("nan"), 1.0)}, "seconds[0] must be a number"),
        ({"further": (-1.0,)}, "further[0] must be a number"),
        ({"further": (0.1, 0.1, 0.1)}, "3 entries of further for 2 sizes"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Curve(**{"kind": "send", "world_size": 2, "sizes": (1, 2), "seconds": (0.1, 0.2), **changes})
    assert told in str(caught.value)


def test_what_makes_no_sense_together() -> None:
    with pytest.raises(UsageError, match="two curves for all_reduce among 4 ranks"):
        Measured(curves=(CURVE, CURVE))
    with pytest.raises(UsageError, match="as many columns as rows"):
        Measured(curves=(), pairs_bps=((0.0, 1.0),))
