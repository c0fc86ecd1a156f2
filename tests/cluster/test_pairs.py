"""Rates of pairs: everyone meets everyone, all at the same time, and racks show in what comes out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from laconic.cluster import Cluster, Link
from laconic.cluster.pairs import measure_pairs, meetings
from laconic.cluster.trials import Stage
from laconic.collectives.placement import placement_of
from laconic.core.clock import WallClock
from laconic.core.hosts import Pairs
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.paced import PacedLink, PacedTransport
from laconic.simulator.network.pair_rates import pair_rates


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_everyone_meets_everyone_equally_often(size: int) -> None:
    rounds = list(meetings(size))
    assert rounds == list(meetings(size))
    for meeting in rounds:
        ranks = [rank for pair in meeting for rank in pair]
        assert len(set(ranks)) == len(ranks) == size - size % 2
    met = Counter(pair for meeting in rounds for pair in meeting)
    assert sorted(met) == [(one, other) for one in range(size) for other in range(one + 1, size)]
    assert set(met.values()) == {3}


def test_one_slow_link_shows_in_its_pairs_and_all_ranks_agree() -> None:
    def one_rank(transport: InProcessTransport) -> Pairs:
        link = PacedLink(20e6 if transport.rank == 2 else 80e6, delay_s=0.0)
        return measure_pairs(Stage(PacedTransport(transport, link), WallClock(), torch.device("cpu")), limit_s=1.0)

    results = InProcessCluster(3).run(one_rank)
    assert results[0] == results[1] == results[2]
    rates = results[0]
    for one in range(3):
        assert rates[one][one] == 0
        for other in range(3):
            assert rates[one][other] == rates[other][one]
            if one != other:
                # A busy machine is slower than its links, never faster.
                assert 0 < rates[one][other] < (25e6 if 2 in (one, other) else 100e6)
    assert rates[0][1] > 2 * max(rates[0][2], rates[1][2])


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize(("hosts", "racks"), [(4, 2), (8, 2), (9, 3), (6, 2), (12, 4)])
def test_uplinks_that_are_no_bottleneck_for_one_pair_show_when_all_send(hosts: int, racks: int, in_turn: bool) -> None:
    link = Link(bandwidth_bps=1e9)
    cluster = Cluster.in_racks(hosts, link, racks=racks, oversubscription=hosts / racks, in_turn=in_turn)
    assert cluster.uplinks[0].bandwidth_bps == link.bandwidth_bps
    rates = pair_rates(cluster, range(hosts))
    groups = {frozenset(group) for group in placement_of(rates).groups}
    assert groups == {
        frozenset(host for host, rack in enumerate(cluster.rack_of) if rack == number) for number in range(racks)
    }
    assert max(map(max, rates)) == pytest.approx(1e9)
    alike = pair_rates(Cluster.uniform(hosts, link), range(hosts))
    assert {round(rate) for row in alike for rate in row} == {0, 10**9}
