"""Which algorithm auto takes, given times."""

from __future__ import annotations

import pytest
import torch

from laconic.architecture.all_reduce import sensible
from laconic.collectives import ALGORITHMS
from laconic.collectives.choice import Costs, fastest, in_words
from laconic.core.clock import WallClock
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.runtime.collective_costs import measure
from tests.collectives.layouts import hosts_of_size

COSTS = Costs(
    sizes=(1_000, 100_000, 1_000_000),
    seconds=(
        ("native", (1.0, 2.0, 10.0)),
        ("tree", (0.5, 3.0, 30.0)),
        ("ring", (1.5, 1.95, 8.0)),
    ),
)


@pytest.mark.parametrize(
    ("nbytes", "chosen"),
    [
        (0, "tree"),
        (1_000, "tree"),
        (10_000, "native"),  # tree was faster for the size below, but not for the one above
        (100_000, "native"),  # ring is faster, but not clearly
        (1_000_000, "ring"),
        (10_000_000, "native"),  # beyond what was measured, where ring was not clearly faster for both
    ],
)
def test_fastest(nbytes: int, chosen: str) -> None:
    assert fastest(COSTS, nbytes) == chosen


def test_what_was_not_measured_is_left_to_the_backend() -> None:
    assert fastest(None, 10) == "native"
    one = Costs((1_000,), (("native", (1.0,)), ("tree", (0.1,))))
    assert fastest(one, 1_000) == "tree"
    assert fastest(one, 1_001) == "native"


def test_never_worse_than_native_by_its_own_numbers() -> None:
    for nbytes in range(0, 3_000_000, 7_919):
        chosen = fastest(COSTS, nbytes)
        assert COSTS.estimate(chosen, nbytes) <= COSTS.estimate("native", nbytes)


def test_lines_between_sizes_and_beyond() -> None:
    assert COSTS.estimate("native", 1) == 1.0
    assert COSTS.estimate("native", 550_000) == pytest.approx(6.0)
    assert COSTS.estimate("native", 1_900_000) == pytest.approx(18.0)


def test_in_words() -> None:
    assert in_words(COSTS).startswith("tree from 0 B, native from ")
    assert "ring from " in in_words(COSTS)
    assert in_words(Costs((1_000,), (("native", (1.0,)),))) == "native from 0 B"


def test_what_makes_sense() -> None:
    assert sensible(((0,),)) == []
    assert sensible(((0, 1),)) == ["ring", "tree"]
    assert sensible((tuple(range(5)),)) == ["ring", "tree", "double_tree", "halving_doubling"]
    assert sensible(hosts_of_size(4, 2)) == list(ALGORITHMS)


def test_all_ranks_measure_the_same_and_within_the_limit() -> None:
    def rank(transport: InProcessTransport) -> Costs:
        costs = measure(sensible(transport.hosts), transport, WallClock(), torch.device("cpu"), limit_s=0.3)
        assert transport.traffic.sent_bytes("payload") == 0
        return costs

    first, *others = InProcessCluster(4, hosts=((0, 1), (2, 3))).run(rank)
    assert all(costs == first for costs in others)
    assert [algorithm for algorithm, _ in first.seconds] == ["native", *ALGORITHMS]
    assert all(time_s > 0 for _, times in first.seconds for time_s in times)
    assert first.sizes == tuple(sorted(first.sizes))
