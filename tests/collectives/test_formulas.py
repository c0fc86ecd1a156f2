"""Formulas against the price of the rows themselves."""

import dataclasses
from typing import cast

import pytest

from laconic.architecture import AllReduce
from laconic.cluster import Cluster, Link
from laconic.collectives import ALGORITHMS
from laconic.collectives.algorithm import Formula, Leg
from laconic.collectives.price import price
from laconic.collectives.ring import RING
from laconic.core.exchange import Move
from laconic.core.hosts import hosts_alone
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.network.contract import seconds
from laconic.simulator.network.flow import FlowNetwork
from tests.collectives.layouts import hosts_of_size

_CHUNKS_FIT = 1 << 24


@pytest.mark.parametrize("algorithm", [name for name, algorithm in ALGORITHMS.items() if not algorithm.by_host])
@pytest.mark.parametrize("world_size", [*range(1, 34), 63, 64])
def test_a_formula_is_the_price_of_the_rows(algorithm, world_size):
    rows = price(ALGORITHMS[algorithm](hosts_alone(world_size)), _CHUNKS_FIT)
    found = ALGORITHMS[algorithm].cost(world_size)
    assert found.num_steps == rows.num_steps
    # Chunks begin at multiples of 16 bytes, so a step may carry that much more than its share.
    assert found.serial_ratio * _CHUNKS_FIT == pytest.approx(rows.serial_bytes, abs=64 * (rows.num_steps + 1))


@pytest.mark.parametrize("algorithm", [name for name, algorithm in ALGORITHMS.items() if algorithm.by_host])
@pytest.mark.parametrize(("world_size", "each"), [(4, 2), (6, 3), (8, 4), (5, 2), (7, 3), (9, 4), (16, 1), (4, 4)])
def test_a_formula_knows_who_shares_a_host(algorithm: str, world_size: int, each: int) -> None:
    hosts = hosts_of_size(world_size, each)
    assert ALGORITHMS[algorithm].cost(world_size, each).num_steps == ALGORITHMS[algorithm](hosts).num_steps


def test_every_algorithm_is_a_choice_of_all_reduce() -> None:
    assert AllReduce.declared()["algorithm"].choices == ("native", "auto", *ALGORITHMS)
    for name in ALGORITHMS:
        assert AllReduce(algorithm=name).algorithm == name


def test_an_algorithm_is_added_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an algorithm says about itself is all the simulator asks: no list of names anywhere else."""
    star = dataclasses.replace(RING, name="star", formula=lambda n, each: Formula((Leg(2, 2.0 * (n - 1)),)))
    monkeypatch.setitem(cast(dict, ALGORITHMS), "star", star)
    cluster = Cluster.uniform(4, Link(bandwidth_bps=8e6, delay_s=0.0))
    took_s = [seconds(network(cluster), Move("sum", (1000,), "star"), 4) for network in (AnalyticNetwork, FlowNetwork)]
    assert took_s == pytest.approx([6 * 1000 / 1e6] * 2)
