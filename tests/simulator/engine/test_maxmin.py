"""Fair rates: cases worked out by hand, the definition itself, and a slow solver."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import LaconicError
from laconic.simulator.engine.maxmin_numba import fair_rates
from tests.simulator.engine.reference import slow_fair_rates


def rates_of(
    capacity: Sequence[float], routes: Sequence[Sequence[int]], multiplicity: Sequence[int] | None = None
) -> npt.NDArray[np.float64]:
    first = np.cumsum([0, *map(len, routes)])
    links = np.array([link for route in routes for link in route], dtype=np.int64)
    return fair_rates(np.array(capacity, float), first, links, None if multiplicity is None else np.array(multiplicity))


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[float], list[list[int]], list[int]]:
    num_links = draw(st.integers(1, 7))
    capacity = draw(st.lists(st.integers(1, 40).map(lambda x: x / 4), min_size=num_links, max_size=num_links))
    route = st.lists(st.integers(0, num_links - 1), unique=True, min_size=1, max_size=min(4, num_links))
    routes = draw(st.lists(route, min_size=1, max_size=12))
    multiplicity = draw(st.lists(st.integers(1, 3), min_size=len(routes), max_size=len(routes)))
    return capacity, routes, multiplicity


def test_one_link_is_shared_alike() -> None:
    assert rates_of([9.0], [[0], [0], [0]]).tolist() == [3.0, 3.0, 3.0]


def test_line_of_two_links_and_three_flows() -> None:
    # The long flow and the first short one share link 0; what the long one leaves of link 1 is the other's.
    assert rates_of([1.0, 2.0], [[0, 1], [0], [1]]).tolist() == [0.5, 0.5, 1.5]


def test_parking_lot() -> None:
    # One flow along all links, one more on each: the narrowest link decides for the long one alone.
    assert rates_of([10.0, 4.0, 8.0], [[0, 1, 2], [0], [1], [2]]).tolist() == [2.0, 8.0, 2.0, 6.0]


def test_two_bottlenecks_one_after_the_other() -> None:
    # Link 0 stops flows 0 and 1 at 1; link 1 has 10 - 1 left for flows 2 and 3; flow 4 has link 2 for itself.
    assert rates_of([2.0, 10.0, 7.0], [[0], [0, 1], [1], [1], [2]]).tolist() == [1.0, 1.0, 4.5, 4.5, 7.0]


def test_a_link_that_is_relieved_by_another_bottleneck() -> None:
    # Link 1 would give 10/3 to each of three flows, but two of them get only 1 elsewhere.
    assert rates_of([2.0, 10.0], [[0, 1], [0, 1], [1]]).tolist() == [1.0, 1.0, 8.0]


def test_multiplicity_counts_as_many_flows() -> None:
    assert rates_of([12.0, 100.0], [[0], [0, 1], [1]], [3, 1, 2]).tolist() == [3.0, 3.0, 48.5]


def test_a_flow_that_crosses_no_link_has_no_limit() -> None:
    assert rates_of([1.0], [[], [0]]).tolist() == [np.inf, 1.0]


def test_no_flows_at_all() -> None:
    assert rates_of([1.0, 2.0], []).tolist() == []


@pytest.mark.parametrize(("capacity", "multiplicity"), [([0.0], [1]), ([-1.0], [1]), ([1.0], [0]), ([1.0], [1, 1])])
def test_what_cannot_be_shared_is_refused(capacity: list[float], multiplicity: list[int]) -> None:
    with pytest.raises(LaconicError, match="fair_rates"):
        rates_of(capacity, [[0]], multiplicity)


@settings(max_examples=150)
@given(networks())
def test_the_definition(network: tuple[list[float], list[list[int]], list[int]]) -> None:
    """No link carries more than it can, and every flow has a full link on which nobody gets more than it."""
    capacity, routes, multiplicity = network
    rates = rates_of(capacity, routes, multiplicity)
    load, most = np.zeros(len(capacity)), np.zeros(len(capacity))
    for route, rate, count in zip(routes, rates, multiplicity, strict=True):
        load[route] += rate * count
        most[route] = np.maximum(most[route], rate)
    assert (load <= np.array(capacity) * (1 + 1e-9)).all()
    full = load >= np.array(capacity) * (1 - 1e-9)
    for route, rate in zip(routes, rates, strict=True):
        assert any(full[link] and rate >= most[link] * (1 - 1e-9) for link in route)


@settings(max_examples=150)
@given(networks())
def test_as_the_slow_solver(network: tuple[list[float], list[list[int]], list[int]]) -> None:
    capacity, routes, multiplicity = network
    np.testing.assert_allclose(
        rates_of(capacity, routes, multiplicity), slow_fair_rates(capacity, routes, multiplicity), rtol=1e-8
    )


@given(networks())
def test_merging_flows_that_are_alike_changes_nothing(network: tuple[list[float], list[list[int]], list[int]]) -> None:
    capacity, routes, multiplicity = network
    one_by_one = [route for route, count in zip(routes, multiplicity, strict=True) for _ in range(count)]
    merged = np.repeat(rates_of(capacity, routes, multiplicity), multiplicity)
    np.testing.assert_allclose(rates_of(capacity, one_by_one), merged, rtol=1e-11)


def test_what_is_alike_gets_exactly_the_same() -> None:
    # 1/3 and 1/7 of links are not exact: rounding must not tell these flows apart.
    num_groups = 50
    routes = [[group, num_groups + group % 7] for group in range(num_groups) for _ in range(3)]
    capacity = [1.0] * num_groups + [0.7 * 3 * sum(group % 7 == k for group in range(num_groups)) for k in range(7)]
    assert len(set(rates_of(capacity, routes).tolist())) == 1
