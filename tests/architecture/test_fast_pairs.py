"""Pairs with the fastest links: against all graphs there are, on links that are slow, and in a session."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.architecture.graphs.fast_pairs import fast_pairs
from laconic.architecture.graphs.topologies import cycle_of, mixing_matrix
from laconic.cluster import Cluster, Link, Racks
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.transport import Work
from laconic.simulator import simulate
from tests.simulator.jobs import job

Speeds = list[list[float]]


def connected(size: int, pairs: set[tuple[int, int]]) -> bool:
    reached, before = {0}, set[int]()
    while reached != before:
        before = set(reached)
        reached |= {j for i, j in pairs if i in before} | {i for i, j in pairs if j in before}
    return len(reached) == size


def used(cycle: tuple[tuple[int, ...], ...]) -> set[tuple[int, int]]:
    return {(i, j) for partners in cycle for i, j in enumerate(partners) if i < j}


@st.composite
def links(draw: st.DrawFn) -> Speeds:
    size = draw(st.integers(2, 9))
    return [[float(draw(st.sampled_from([1, 8, 64, 512]))) for _ in range(size)] for _ in range(size)]


@given(links())
def test_no_link_is_used_that_is_slower_than_it_must_be(speeds: Speeds) -> None:
    size = len(speeds)
    both = {(i, j): min(speeds[i][j], speeds[j][i]) for i, j in combinations(range(size), 2)}
    best = max(limit for limit in both.values() if connected(size, {pair for pair in both if both[pair] >= limit}))
    cycle = fast_pairs(speeds)
    for partners in cycle:
        assert all(partners[partners[rank]] == rank for rank in range(size)), "pairs know of each other"
    assert connected(size, used(cycle))
    assert min(both[pair] for pair in used(cycle)) == best
    assert len(cycle) <= size - 1


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_equal_links_end_with_the_exact_mean(size: int) -> None:
    """Noise below a factor of two changes nothing."""
    generator = torch.Generator().manual_seed(3)
    noise = (1 + 0.3 * torch.rand(size, size, generator=generator)).tolist()
    cycle = fast_pairs(noise)
    assert cycle == fast_pairs([[1.0] * size] * size)
    product = torch.eye(size, dtype=torch.float64)
    for round in range(size.bit_length() - 1):
        product = mixing_matrix(cycle_of(cycle), size, round, 0) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / size))


@given(st.floats(0.001, 1), st.lists(st.floats(0.7, 1.3), min_size=4, max_size=4))
def test_noise_does_not_divide_slow_links(slow: float, noise: list[float]) -> None:
    """Two sites of two: whatever the links between them are compared with those inside, they are alike."""
    speeds = [[10.0] * 4 for _ in range(4)]
    for (i, j), times in zip(((0, 2), (0, 3), (1, 2), (1, 3)), noise, strict=True):
        speeds[i][j] = speeds[j][i] = slow * times
    assert fast_pairs(speeds) == ((2, 3, 0, 1), (1, 0, 3, 2))


def test_links_that_carry_nothing_come_last() -> None:
    assert used(fast_pairs([[0.0, 0.0, 9.0], [0.0, 0.0, 1.0], [9.0, 1.0, 0.0]])) == {(0, 2), (1, 2)}
    assert used(fast_pairs([[0.0] * 2] * 2)) == {(0, 1)}


@pytest.mark.parametrize("size", [3, 5, 6, 8])
def test_replicas_come_together_over_unlike_links(size: int) -> None:
    """Two sites, far from each other."""
    site = [rank * 2 // size for rank in range(size)]
    cycle = fast_pairs([[1000.0 if site[i] == site[j] else 1.0 for j in range(size)] for i in range(size)])
    crossing = [sum(site[i] != site[j] for i, j in enumerate(partners) if i < j) for partners in cycle]
    assert sum(map(bool, crossing)) == 1, "one round of a cycle crosses between the sites"
    product = torch.eye(size, dtype=torch.float64)
    for round in range(40 * len(cycle)):
        product = mixing_matrix(cycle_of(cycle), size, round, 0) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / size), atol=1e-3, rtol=0)


def test_slow_links_share_rounds() -> None:
    """Four sites of two: one link in four is slow in the tree, and all that must be used fit into two rounds."""
    cycle = fast_pairs([[64.0 if i // 2 == j // 2 else 1.0 for j in range(8)] for i in range(8)])
    crossing = [any(i // 2 != j // 2 for i, j in enumerate(partners)) for partners in cycle]
    assert crossing.count(True) == 2
    assert crossing.count(False) >= 1


class _SitesTransport(InProcessTransport):
    """Messages between the first ranks and the others take long."""

    num_near = 2

    def send_receive(self, sends, receives, **rest) -> Work:
        if any(
            (self.rank < self.num_near) != (peer < self.num_near)
            for peer, tensor in [*sends, *receives]
            if tensor.numel() > 1
        ):
            time.sleep(0.1)  # long beside what a busy machine adds
        return super().send_receive(sends, receives, **rest)


class Sites(InProcessCluster):
    """Ranks on two sites; the first site has so many of them."""

    num_near = 2

    def transport(self, rank: int) -> InProcessTransport:
        made = _SitesTransport(self, rank)
        made.num_near = self.num_near
        made.in_process = False  # so that links are measured
        return made


def test_links_are_measured_when_attaching() -> None:
    models = [torch.nn.Linear(3, 2) for _ in range(4)]

    def one_rank(transport: InProcessTransport) -> tuple[str, int, int]:
        model, events = models[transport.rank], laconic.EventList()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        text = "bsp / gossip(topology=fast_pairs)"
        with laconic.attach(model, optimizer, text, transport=transport, events=events) as session:
            assert str(session.strategy) == f"{text} / none / fusion"
            before = session.traffic.sent_bytes("payload")
            for _ in range(4):
                model(torch.ones(1, 3) * transport.rank).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            session.wait()
            sent = session.traffic.sent_bytes("payload") - before
        (attached,) = [event for event in events.events if event.kind == "attach"]
        return str(attached.data["pairs"]), sent, sum(p.nbytes for p in model.parameters())

    for pairs, sent, nbytes in Sites(4, timeout_s=60).run(one_rank):
        assert pairs == "0-2 1-3, 0-1 2-3"
        assert sent == 4 * nbytes, "one partner in every round"


def test_the_simulator_takes_the_links_of_the_cluster() -> None:
    two_sites = Cluster(
        links=(Link(bandwidth_bps=1e9),) * 8,
        topology=Racks(sizes=(4, 4), uplinks=(Link(bandwidth_bps=1e7),) * 2),
    )
    work = job((0.001, 0.002, 400_000))
    fast, drawn = (
        simulate(laconic.Strategy.parse(f"bsp / gossip(topology={name})"), work, two_sites).prediction.step_s
        for name in ("fast_pairs", "random_pairs")
    )
    assert fast < drawn / 1.5
