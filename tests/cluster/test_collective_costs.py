"""Times of collective operations: exact where measured, closed formulas beyond, and monotone everywhere."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cluster.collective_costs import (
    OPERATIONS,
    CollectiveCosts,
    NodeLink,
    SizeCurve,
    System,
    system,
    system_names,
)
from laconic.errors import UsageError

SIZES = tuple(float(4**power) for power in range(5, 16))
MEASURED = [name for name, operation in OPERATIONS.items() if operation.measured]


def ring(base_s: float, step_s: float, rate: float, *, ratio: float = 0.0, gpus: tuple[int, ...] = (2, 4)) -> System:
    """A system that keeps exactly to t = base + steps * (step + chunk / rate)."""

    def curve(name: str, count: int) -> SizeCurve:
        steps = OPERATIONS[name].steps(count)
        return SizeCurve(SIZES, tuple(base_s + steps * (step_s + size / count / rate) for size in SIZES))

    curves = {name: {count: curve(name, count) for count in gpus} for name in MEASURED}
    link = NodeLink(nics=8, nic_bytes_per_s=50e9, efficiency=1.0, hop_s=5e-6)
    return System(name="ring", curves=curves, in_switch_ratio=ratio, node_link=link)


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(MEASURED),
    gpus=st.integers(2, 64),
    nbytes=st.floats(1e6, 1e9),
    law=st.tuples(st.floats(1e-6, 1e-4), st.floats(1e-7, 1e-5), st.floats(1e9, 1e12)),
)
def test_a_ring_is_extrapolated_exactly(name: str, gpus: int, nbytes: float, law: tuple[float, float, float]) -> None:
    base_s, step_s, rate = law
    costs = CollectiveCosts(ring(base_s, step_s, rate))
    steps = OPERATIONS[name].steps(gpus)
    # Beyond the smallest chunk time is flat, so the closed formula holds from there on.
    chunk = max(nbytes / gpus, SIZES[0] / 2)
    assert costs.seconds(name, chunk * gpus, gpus) == pytest.approx(base_s + steps * (step_s + chunk / rate), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(OPERATIONS)),
    where=st.sampled_from(sorted(system_names())),
    gpus=st.integers(1, 4),
    nodes=st.integers(1, 4),
    sizes=st.tuples(st.floats(1, 1e10), st.floats(1, 1e10)),
)
def test_more_bytes_never_take_less_time(
    name: str, where: str, gpus: int, nodes: int, sizes: tuple[float, float]
) -> None:
    costs = CollectiveCosts(where, node_link=NodeLink(nics=8, nic_bytes_per_s=50e9))
    few, many = sorted(sizes)
    total = 2 * gpus * nodes
    assert 0 < costs.seconds(name, few, total, nodes) <= costs.seconds(name, many, total, nodes)


def test_measured_points_are_returned_and_others_warned_about() -> None:
    costs = CollectiveCosts("h100_sxm")
    curve = system("h100_sxm").curves["all_gather"][4]
    found = costs.estimate("all_gather", curve.sizes[3], 4)
    assert (found.seconds, found.warnings) == (curve.seconds[3], ())
    assert costs.estimate("all_gather", 1, 4).seconds == curve.startup_s
    assert "extrapolated from 2 and 4" in costs.estimate("all_gather", 1e6, 8).warnings[0]
    assert "interpolated from 2 and 4" in costs.estimate("all_gather", 1e6, 3).warnings[0]
    assert "rate of the largest sizes" in costs.estimate("all_gather", 1e10, 4).warnings[0]
    assert "between 2 nodes" in costs.estimate("all_gather", 1e6, 8, 2).warnings[-1]
    assert len(costs.warnings()) == 4
    assert costs.estimate("all_reduce", 0, 8).seconds == costs.estimate("all_reduce", 1e6, 1).seconds == 0.0


def test_switches_that_add_up_replace_the_ring_only_where_they_are_faster() -> None:
    rate, nbytes = 400e9, 8e9
    without = CollectiveCosts(ring(10e-6, 1e-6, rate)).seconds("all_reduce", nbytes, 8)
    within = CollectiveCosts(ring(10e-6, 1e-6, rate, ratio=0.85)).seconds("all_reduce", nbytes, 8)
    assert within < without
    assert within == pytest.approx(nbytes * (1 + 1 / 8) / (0.85 * rate), rel=0.02)
    small = [CollectiveCosts(ring(10e-6, 1e-6, rate, ratio=ratio)).seconds("all_reduce", 1e4, 8) for ratio in (0, 0.85)]
    assert small[0] == small[1]


def test_a_slower_link_paces_every_further_step() -> None:
    # 2 GPUs at 20 GB/s, 4 at 5 GB/s: 8 keep the 5 GB/s, they do not lose three quarters once more.
    fast, slow = ring(0.0, 1e-6, 20e9), ring(0.0, 1e-6, 5e9)
    curves = {"all_gather": {2: fast.curves["all_gather"][2], 4: slow.curves["all_gather"][4]}}
    costs = CollectiveCosts(System(name="sockets", curves=curves))
    nbytes = 4e9
    assert costs.seconds("all_gather", nbytes, 8) == pytest.approx(nbytes * 7 / 8 / 5e9, rel=0.01)


def test_derived_operations_and_nodes_have_closed_formulas() -> None:
    base_s, step_s, rate = 10e-6, 1e-6, 400e9
    costs, nbytes = CollectiveCosts(ring(base_s, step_s, rate)), 64e6
    assert costs.seconds("send", nbytes, 2) == pytest.approx(base_s + step_s + nbytes / rate)
    assert costs.seconds("broadcast", nbytes, 4) == pytest.approx(base_s + 3 * step_s + nbytes / rate)
    link = NodeLink(nics=8, nic_bytes_per_s=1e9, efficiency=1.0, hop_s=5e-6)
    slow = CollectiveCosts(ring(base_s, step_s, rate), node_link=link)
    sent = 2 * 31 / 32 * nbytes
    assert slow.seconds("all_reduce", nbytes, 32, 4) == pytest.approx(sent / 8e9 + 2 * math.log2(4) * 5e-6)
    # Of each GPU's buffer three quarters go to other nodes, and every GPU has a NIC.
    assert slow.seconds("all_to_all", nbytes, 32, 4) == pytest.approx(nbytes * 3 / 4 / 1e9 + 3 * 5e-6)
    assert slow.seconds("send", nbytes, 2, 2) == pytest.approx(nbytes / 1e9 + 5e-6)


def test_a_disturbed_measurement_is_lowered_to_what_more_bytes_took() -> None:
    curve = SizeCurve.fitted([1, 4, 16, 64], [5e-6, 9e-6, 6e-6, 8e-6])
    assert curve.seconds == (5e-6, 6e-6, 6e-6, 8e-6)
    assert curve.at(40) == pytest.approx(7e-6)
    assert curve.at(64 + 48) == pytest.approx(10e-6)


@pytest.mark.parametrize(
    ("name", "nbytes", "gpus", "nodes", "expected"),
    [
        ("all_reduze", 1, 2, 1, 'no operation "all_reduze". Did you mean "all_reduce"'),
        ("all_reduce", -1, 2, 1, "number of bytes must be at least 0"),
        ("all_reduce", math.nan, 2, 1, "number of bytes must be at least 0"),
        ("all_reduce", 1, 0, 1, "number of GPUs must be from 1"),
        ("all_reduce", 1, 12, 5, "12 GPUs cannot be spread evenly over 5 nodes. Use 10 GPUs"),
        ("all_reduce", 1, 16, 2, "nothing is known about the network between nodes of l40s"),
    ],
)
def test_bad_questions_are_refused(name: str, nbytes: float, gpus: int, nodes: int, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        CollectiveCosts("l40s").seconds(name, nbytes, gpus, nodes)
    assert expected in str(caught.value)


def test_bad_tables_are_refused() -> None:
    with pytest.raises(UsageError, match="no measured system"):
        system("h100_smx")
    only = System(name="one", curves={"all_reduce": system("b60").curves["all_reduce"]})
    with pytest.raises(UsageError, match="all_gather was not measured on one"):
        CollectiveCosts(only).seconds("all_gather", 1, 4)
    assert "as much as all_gather" in CollectiveCosts("b60").estimate("all_to_all", 1, 4).warnings[0]
    for sizes, seconds in (
        ((1.0,), (1.0,)),
        ((1.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((1.0, 2.0), (0.0, 1.0)),
    ):
        with pytest.raises(UsageError):
            SizeCurve(sizes, seconds)
