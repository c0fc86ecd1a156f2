"""Sums on the path, priced: by hand on one switch, with few slots, and beside published rates."""

from __future__ import annotations

import pytest

from laconic.cluster import Cluster, Link
from laconic.core.exchange import Move
from laconic.simulator.network.analytic import AnalyticNetwork
from laconic.simulator.network.contract import seconds
from laconic.simulator.network.flow import FlowNetwork
from laconic.simulator.reference.published import Row
from laconic.simulator.reference.tables import published_table

NBYTES = 10_000_000
HEADERS = 1464 / 1440
networks = pytest.mark.parametrize("network", [AnalyticNetwork, FlowNetwork])


def on_the_path(slots: int = 512) -> Move:
    return Move("aggregate", (NBYTES,), slots=slots)


@networks
@pytest.mark.parametrize("workers", [2, 4, 16])
def test_every_byte_crosses_a_link_once_each_way(network, workers: int) -> None:
    priced = network(Cluster.uniform(workers, Link(bandwidth_bps=80e6)))
    assert seconds(priced, on_the_path(), workers, 1) == pytest.approx(HEADERS)
    ring = seconds(priced, Move("sum", (NBYTES,), "ring"), workers)
    assert ring / seconds(priced, on_the_path(), workers, 1) == pytest.approx(2 * (workers - 1) / workers / HEADERS)
    assert seconds(priced, on_the_path(), 1, 1) == 0


@networks
def test_few_slots_carry_few_frames_per_round_trip(network) -> None:
    priced = network(Cluster.uniform(4, Link(bandwidth_bps=80e9, delay_s=0.005)))
    # To the switch and back, 5 ms each way.
    for slots in (1, 64):
        expected_s = NBYTES / (slots * 1440) * 0.01 + 0.01
        assert seconds(priced, on_the_path(slots), 4, 1) == pytest.approx(expected_s)
    assert seconds(priced, on_the_path(80_000), 4, 1) == pytest.approx(NBYTES * HEADERS / 10e9 + 0.01)


@networks
def test_ranks_of_a_host_share_its_link(network) -> None:
    priced = network(
        Cluster(links=(Link(bandwidth_bps=80e6),) * 3, devices_per_host=2, inside=Link(bandwidth_bps=1e12))
    )
    assert seconds(priced, on_the_path(), 6, 1) == pytest.approx(2 * HEADERS, rel=1e-3)


@pytest.mark.parametrize(("workers", "published"), [(4, 2830 / 1380), (8, 2820 / 1250), (16, 2810 / 970)])
def test_the_ratio_to_a_ring_is_near_the_published_one(workers: int, published: float) -> None:
    found = published_table("switchml").predict(Row({"workers": str(workers)}))
    assert found["ratio"] == pytest.approx(published, rel=0.15)
