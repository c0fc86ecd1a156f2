"""Who talks to whom: mixing matrices keep the mean, and every replica hears of every other in time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.architecture.graphs.topologies import RANDOM_TARGETS, TOPOLOGIES, Topology, mixing_matrix
from laconic.errors import LaconicError

BALANCED = [topology for topology in TOPOLOGIES.values() if topology.balanced]
every_topology = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
every_balanced_topology = pytest.mark.parametrize("topology", BALANCED, ids=[topology.name for topology in BALANCED])
SIZES = range(1, 21)


def edges(topology: Topology, size: int, round: int, seed: int = 0) -> set[tuple[int, int]]:
    """(sender, receiver) as the senders say."""
    return {(rank, peer) for rank in range(size) for peer in topology.neighbourhood(rank, size, round, seed).sends}


@every_topology
@pytest.mark.parametrize("size", SIZES)
def test_both_ends_of_an_edge_know_of_it(topology: Topology, size: int) -> None:
    for round in range(6):
        sent = edges(topology, size, round)
        parts = [topology.neighbourhood(rank, size, round, 0) for rank in range(size)]
        assert {(peer, rank) for rank in range(size) for peer in parts[rank].receives} == sent
        assert not any(sender == receiver for sender, receiver in sent)
        assert all(0 <= receiver < size for _, receiver in sent)
        assert all(part.sends == tuple(sorted(set(part.sends))) for part in parts)
        assert all(part.receives == tuple(sorted(set(part.receives))) for part in parts)
        if topology.symmetric:
            assert sent == {(receiver, sender) for sender, receiver in sent}
        if topology.fixed:
            assert sent == edges(topology, size, 0)
        if topology.balanced:
            assert all(len(part.sends) == len(part.receives) for part in parts)


@every_balanced_topology
@pytest.mark.parametrize("size", SIZES)
def test_doubly_stochastic_and_connected_over_time(topology: Topology, size: int) -> None:
    product = torch.eye(size, dtype=torch.float64)
    everyone = torch.full((size, size), 1 / size, dtype=torch.float64)
    for round in range(400):
        matrix = mixing_matrix(topology, size, round, 0)
        if round < 8:
            ones = torch.ones(size, dtype=torch.float64)
            torch.testing.assert_close(matrix.sum(0), ones)
            torch.testing.assert_close(matrix.sum(1), ones)
            assert bool((matrix >= 0).all())
            assert bool((matrix.diagonal() > 0).all())
            assert torch.equal(matrix, matrix.T) or not topology.symmetric
        product = matrix @ product
        if torch.allclose(product, everyone, atol=1e-3):
            break
    torch.testing.assert_close(product, everyone, atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_peer_exponential_ends_with_the_exact_mean(size: int) -> None:
    """After log2(n) rounds, if n is a power of two (Ying et al. 2021)."""
    product = torch.eye(size, dtype=torch.float64)
    for round in range(size.bit_length() - 1):
        assert not torch.allclose(product, torch.full_like(product, 1 / size))
        product = mixing_matrix(TOPOLOGIES["one_peer_exponential"], size, round, 0) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / size))


def test_neighbours_by_hand() -> None:
    def sends(name: str, rank: int, size: int, round: int = 0) -> tuple[int, ...]:
        return TOPOLOGIES[name].neighbourhood(rank, size, round, 0).sends

    assert sends("ring", 0, 5) == (1, 4)
    assert sends("ring", 0, 2) == (1,)
    assert sends("ring", 0, 1) == ()
    assert sends("torus", 5, 12) == (1, 4, 6, 9), "three rows of four"
    assert sends("torus", 0, 7) == (1, 6), "one row: a ring"
    assert sends("exponential", 6, 10) == (0, 4, 7, 8)
    assert [sends("one_peer_exponential", 6, 10, round) for round in range(5)] == [(7,), (8,), (0,), (4,), (7,)]


@given(st.integers(1, 20), st.integers(0, 2**31), st.integers(0, 2**31 - 1))
def test_random_pairs_are_pairs(size: int, round: int, seed: int) -> None:
    topology = TOPOLOGIES["random_pairs"]
    partners = [topology.neighbourhood(rank, size, round, seed).sends for rank in range(size)]
    assert sum(not partner for partner in partners) == size % 2
    for rank, partner in enumerate(partners):
        assert partner == () or partners[partner[0]] == (rank,)


@given(st.integers(2, 20), st.integers(0, 2**31), st.integers(0, 2**31 - 1))
def test_random_targets_send_to_one_other_each(size: int, round: int, seed: int) -> None:
    assert all(len(RANDOM_TARGETS.neighbourhood(rank, size, round, seed).sends) == 1 for rank in range(size))


@pytest.mark.parametrize("name", ["random_pairs", "random_targets"])
def test_draws_differ_between_rounds_and_seeds_and_are_the_same_every_time(name: str) -> None:
    topology = TOPOLOGIES[name]
    drawn = [edges(topology, 12, round, seed) for seed in (0, 1) for round in range(10)]
    assert len({frozenset(one) for one in drawn}) > 15
    assert drawn == [edges(topology, 12, round, seed) for seed in (0, 1) for round in range(10)]


def test_a_matrix_that_does_not_keep_the_mean_is_refused() -> None:
    heard = [len(RANDOM_TARGETS.neighbourhood(rank, 8, 0, 0).receives) for rank in range(8)]
    assert set(heard) != {1}, "by chance everybody may hear one, but not in this round"
    with pytest.raises(LaconicError, match=r'topology "random_targets" with 8 replicas: .* instead of 1, so the mean'):
        mixing_matrix(RANDOM_TARGETS, 8, 0, 0)
