"""Sweeps: which settings there are, in which order they come, and what becomes of strategies that do not fit."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cluster import Cluster, Link, cluster
from laconic.cluster.place import Setting
from laconic.errors import UsageError
from laconic.simulator.network.flow import FlowNetwork
from laconic.simulator.simulation import Conditions, simulate
from laconic.simulator.sweep import Sweep, parse_counts
from laconic.strategy import Strategy
from laconic.workload import Layer, TensorShape, Workload

SMALL = Workload(
    name="small",
    batch=4,
    layers=tuple(
        Layer(
            name=f"l{number}",
            forward_s=0.002,
            backward_s=0.004,
            tensors=(TensorShape(name=f"l{number}.weight", shape=(1000, 500)),),
        )
        for number in range(4)
    ),
    source="Made up for tests.",
)


def setting(workers: int, gbit: float = 1.0) -> Setting:
    made = Cluster.uniform(workers, Link(bandwidth_bps=gbit * 1e9))
    return Setting(cluster=made, workers=workers, bandwidth_bps=gbit * 1e9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", (8,)),
        ("4,8,16", (4, 8, 16)),
        ("16, 4", (16, 4)),
        ("4..1024", (4, 8, 16, 32, 64, 128, 256, 512, 1024)),
        ("4..4", (4,)),
        ("6..48", (6, 12, 24, 48)),
        ("4..20", (4, 8, 16, 20)),
        ("4..16..4", (4, 8, 12, 16)),
        ("4..18..5", (4, 9, 14)),
        ("2,2..8,3", (2, 4, 8, 3)),
    ],
)
def test_counts_are_read(text: str, expected: tuple[int, ...]) -> None:
    assert parse_counts(text, "--workers") == expected


@pytest.mark.parametrize(
    "text", ["", "x", "4..", "..4", "4..x", "8..4", "0", "0..4", "4..8..0", "-1", "1.5", "4...8", "1..1000000..1", "٣"]
)
def test_what_is_not_a_count_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--workers"):
        parse_counts(text, "--workers")


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_range_doubles_and_ends_where_it_says(one: int, other: int) -> None:
    first, last = sorted((one, other))
    found = parse_counts(f"{first}..{last}", "--workers")
    assert (found[0], found[-1]) == (first, last)
    ratios = [later / earlier for earlier, later in pairwise(found)]
    assert all(ratio == 2 for ratio in ratios[:-1])
    assert all(1 < ratio <= 2 for ratio in ratios)


def test_every_strategy_runs_in_every_setting_in_the_order_given() -> None:
    strategies = tuple(map(Strategy.parse, ("dear", "ddp")))
    settings = (setting(4, 10), setting(2), setting(4))
    sweep = Sweep(strategies=strategies, workload=SMALL, settings=settings)
    rows = list(sweep.rows())
    assert len(sweep) == len(rows) == 6
    assert [(row.strategy, row.setting) for row in rows] == [(s, place) for place in settings for s in strategies]
    for row in rows:
        assert (
            row.prediction == simulate(row.strategy, SMALL, row.setting.cluster, workers=row.setting.workers).prediction
        )


def test_conditions_and_fidelity_reach_every_simulation() -> None:
    slow = Conditions(slow={1: 3.0})
    place = setting(4)
    for strategy, fidelity in [("ddp", "analytic"), ("bsp / all_reduce(algorithm=tree) / none", "flow")]:
        (row,) = Sweep(
            strategies=(Strategy.parse(strategy),),
            workload=SMALL,
            settings=(place,),
            fidelity=fidelity,  # pyrefly: ignore
            conditions=slow,
        ).rows()
        network = FlowNetwork(place.cluster) if fidelity == "flow" else None
        assert row.prediction == simulate(strategy, SMALL, place.cluster, network=network, conditions=slow).prediction


def test_a_strategy_that_does_not_fit_is_a_row_that_says_why() -> None:
    strategies = tuple(map(Strategy.parse, ("ddp", "bsp / all_reduce(algorithm=torus2d) / none")))
    sweep = Sweep(strategies=strategies, workload=SMALL, settings=(setting(7), setting(6)))
    rows = list(sweep.rows())
    assert [row.prediction is None for row in rows] == [False, True, False, False]
    assert re.search("7 is a prime", rows[1].refused)
    assert rows[3].refused == ""


def test_a_known_cluster_is_simulated_whole_by_default() -> None:
    made = cluster("pcie-box")
    (row,) = Sweep(
        strategies=(Strategy(),),
        workload=SMALL,
        settings=(Setting(cluster=made, workers=made.num_devices, bandwidth_bps=10e9),),
    ).rows()
    assert row.prediction is not None
    assert row.prediction.workers == 8
