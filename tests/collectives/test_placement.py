"""Groups and orders from rates of pairs: racks are found again, and every algorithm works in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.collectives import ALGORITHMS
from laconic.collectives.check import check
from laconic.collectives.placement import groups_in_words, placed, placement_of
from laconic.collectives.price import price
from laconic.core.hosts import Hosts, Pairs, hosts_alone
from laconic.errors import LaconicError


def rates(rack_of: list[int], inside: float, between: float, noise: float = 0.0, seed: int = 0) -> Pairs:
    """Of ranks in racks, each pair up to `noise` slower than it should be."""
    draw, size = random.Random(seed), len(rack_of)
    table = [[0.0] * size for _ in range(size)]
    for one in range(size):
        for other in range(one):
            rate = (inside if rack_of[one] == rack_of[other] else between) * (1 - noise * draw.random())
            table[one][other] = table[other][one] = rate
    return tuple(map(tuple, table))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(2, 6), min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_racks_are_found_wherever_their_ranks_are(sizes: list[int], seed: int) -> None:
    rack_of = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    random.Random(seed).shuffle(rack_of)
    found = placement_of(rates(rack_of, 100.0, 40.0, noise=0.15, seed=seed))
    racks = {frozenset(rank for rank, rack in enumerate(rack_of) if rack == number) for number in range(len(sizes))}
    assert {frozenset(group) for group in found.groups} == racks
    # A ring through them leaves each rack once.
    order = [rack_of[rank] for group in found.groups for rank in group]
    assert sum(one != next_one for one, next_one in zip(order, [*order[1:], order[0]], strict=True)) == len(sizes)
    assert 1.5 < found.drop < 3.2


def test_ranks_that_are_alike_stay_as_they_are() -> None:
    alike = rates([0] * 6, 100.0, 100.0, noise=0.15)
    assert len(placement_of(alike).groups) == 1
    hosts = ((0, 1, 2), (3, 4, 5))
    assert placed(hosts, alike) == placed(hosts, ()) == hosts
    assert placed(((0,), (1,)), rates([0, 1], 1.0, 1.0)) == ((0,), (1,))


def test_hosts_in_racks_are_the_groups_and_racks_stay_together() -> None:
    """Ranks 0 to 7 on hosts of two, whose racks are (host 0, host 2) and (host 1, host 3)."""

    def rate(one: int, other: int) -> float:
        if one == other:
            return 0.0
        return 1000.0 if one // 2 == other // 2 else 100.0 if one // 2 % 2 == other // 2 % 2 else 40.0

    found = placement_of(tuple(tuple(rate(one, other) for other in range(8)) for one in range(8)))
    assert groups_in_words(found.groups) == "0 1 | 4 5 | 2 3 | 6 7"


def test_the_slower_direction_counts() -> None:
    up = [list(row) for row in rates([0, 0, 1, 1], 100.0, 100.0)]
    up[0][2] = up[3][1] = up[0][3] = up[1][2] = 10.0
    assert placement_of(tuple(map(tuple, up))).groups == ((0, 1), (2, 3))
    with pytest.raises(LaconicError, match="square table of positive numbers"):
        placement_of(((0.0, 1.0), (0.0, 0.0)))


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("groups", [((4, 1, 3), (0, 5, 2)), ((2, 0), (3, 1, 4)), ((3, 1, 0, 2),)])
def test_every_algorithm_is_an_all_reduce_in_any_order(algorithm: str, groups: Hosts) -> None:
    made, size = ALGORITHMS[algorithm](groups), sum(map(len, groups))
    check(made)
    order = [rank for group in groups for rank in group]
    if algorithm == "ring":
        pairs = {(row.source, row.destination) for row in made.rows()}
        assert pairs == set(zip(order, [*order[1:], order[0]], strict=True))
    if algorithm != "hierarchical":
        plain = price(ALGORITHMS[algorithm](hosts_alone(size)), 4800).sent_bytes
        assert price(made, 4800).sent_bytes == tuple(plain[order.index(rank)] for rank in range(size))
