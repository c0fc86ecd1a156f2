"""All-reduces in racks behind slow uplinks, compared with bytes over bandwidth computed by hand."""

from __future__ import annotations

import pytest

from laconic.cluster import Cluster, Link
from laconic.core.exchange import Move
from laconic.simulator import simulate
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.network.contract import seconds
from laconic.simulator.network.flow import FlowNetwork
from tests.simulator.jobs import job

RATE = 1e9
"""Bytes per second of a host's link."""
NBYTES = 48_000_000


@pytest.mark.parametrize("kind", [AnalyticNetwork, FlowNetwork])
@pytest.mark.parametrize(("hosts", "racks", "oversubscription"), [(8, 2, 4.0), (4, 2, 4.0), (12, 3, 8.0)])
def test_what_crosses_uplinks_decides(kind, hosts: int, racks: int, oversubscription: float) -> None:
    link = Link(bandwidth_bps=8 * RATE)
    cluster = Cluster.in_racks(hosts, link, racks=racks, oversubscription=oversubscription, in_turn=True)
    network, each = kind(cluster), hosts // racks
    uplink = RATE * each / oversubscription
    groups = tuple(tuple(range(rack, hosts, racks)) for rack in range(racks))
    ring_bytes = 2 * (hosts - 1) / hosts * NBYTES

    def takes_s(algorithm: str, groups=()) -> float:
        return seconds(network, Move("sum", (NBYTES,), algorithm, groups=groups), hosts)

    # Every host of a rack sends to a host of another one; placed, one of each rack does.
    assert takes_s("ring") == pytest.approx(ring_bytes * each / uplink, rel=1e-3)
    assert takes_s("ring", groups) == pytest.approx(ring_bytes / min(RATE, uplink), rel=1e-3)
    inside, between = 2 * (each - 1) / each * NBYTES / RATE, 2 * (racks - 1) / racks * NBYTES / uplink
    assert takes_s("hierarchical", groups) == pytest.approx(inside + between, rel=1e-3)
    leaders = [
        Move("to_leaders", (NBYTES,), groups=groups),
        Move("sum", (NBYTES,), "ring", among_hosts=True, groups=groups),
        Move("from_leaders", (NBYTES,), groups=groups),
    ]
    trees = 2 * (each - 1).bit_length() * NBYTES / RATE
    ring = 2 * (racks - 1) / racks * NBYTES / min(RATE, uplink)
    assert sum(seconds(network, move, hosts) for move in leaders) == pytest.approx(trees + ring, rel=1e-3)


@pytest.mark.parametrize("kind", [AnalyticNetwork, FlowNetwork])
def test_a_placed_ring_of_gossip_crosses_each_uplink_once_in_each_direction(kind) -> None:
    cluster = Cluster.in_racks(8, Link(bandwidth_bps=8 * RATE), racks=2, oversubscription=4, in_turn=True)
    numbered, placed = (
        simulate(f"bsp / gossip{settings} / none / sequential", job((0.1, 0.2, NBYTES)), cluster, network=kind(cluster))
        for settings in ("", "(placement=measured)")
    )
    # As numbered, all eight messages of a rack's four hosts leave it; placed, two do, as on each host's own link.
    gained_s = numbered.prediction.step_s - placed.prediction.step_s
    assert gained_s == pytest.approx((8 - 2) * NBYTES / RATE, rel=0.01)


@pytest.mark.parametrize("kind", [AnalyticNetwork, FlowNetwork])
def test_a_strategy_is_placed_as_its_ranks_would_measure(kind) -> None:
    cluster = Cluster.in_racks(8, Link(bandwidth_bps=8e9), racks=2, oversubscription=4.0, in_turn=True)
    steps = {
        text: simulate(f"bsp / {text} / none / sequential", job((0.1, 0.2, NBYTES)), cluster, network=kind(cluster))
        for text in (
            "all_reduce(ring)",
            "all_reduce(ring, placement=measured)",
            "all_reduce(hierarchical, placement=measured)",
            "all_reduce(auto, placement=measured)",
        )
    }
    # 48 MB at 1 GB/s: 7, 1.75 and 2.5 times as long as one host's link takes for them.
    flat, ring, hierarchical, auto = (found.prediction.step_s for found in steps.values())
    assert flat - ring == pytest.approx(0.048 * (7 - 1.75), rel=0.01)
    assert flat - hierarchical == pytest.approx(0.048 * (7 - 2.5), rel=0.01)
    assert auto <= ring * 1.01
