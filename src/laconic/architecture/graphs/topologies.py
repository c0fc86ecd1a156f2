"""The neighbours of each replica in a round of gossip.

A round is a matrix W: row i says how replica i mixes its own values and those it receives, all with the same weight,
W_ij = 1 / (1 + number of replicas that i receives from). Where every replica receives from as many as it sends to, rows
and columns of W add up to one, and the mean over all replicas is preserved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from laconic.architecture.graphs.fast_pairs import Partners, fast_pairs
from laconic.errors import InvalidSetting, LaconicError

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Neighbourhood:
    """One replica's part in one round, ranks in ascending order."""

    sends: tuple[int, ...]
    """Ranks that get this replica's values."""
    receives: tuple[int, ...]
    """Ranks whose values this replica gets."""

    @property
    def weight(self) -> float:
        """The weight of each value received, and of the replica's own."""
        return 1.0 / (1 + len(self.receives))


@dataclass(frozen=True)
class Topology:
    """A rule for the edges of every round."""

    name: str
    fixed: bool
    """The same neighbours in every round."""
    symmetric: bool
    """A replica receives from every replica that it sends to."""
    balanced: bool
    """Every replica receives from as many replicas as it sends to."""
    targets: Callable[[int, int, int, int], set[int]]
    """(rank, world size, round, seed): the ranks that this rank sends to."""
    draws: bool = False
    """Whether targets are drawn from the seed."""

    def placed(self, rank: int, order: Sequence[int], round: int, seed: int) -> Neighbourhood:
        """The same where the i-th rank of `order` stands in the place of rank i."""
        around = self.neighbourhood(order.index(rank), len(order), round, seed)
        sends, receives = (tuple(sorted(order[place] for place in ends)) for ends in (around.sends, around.receives))
        return Neighbourhood(sends, receives)

    def neighbourhood(self, rank: int, world_size: int, round: int, seed: int) -> Neighbourhood:
        """The ranks that `rank` sends to and receives from in `round`."""
        sends = self.targets(rank, world_size, round, seed)
        if self.symmetric:
            receives = sends
        else:
            others = (other for other in range(world_size) if other != rank)
            receives = {other for other in others if rank in self.targets(other, world_size, round, seed)}
        return Neighbourhood(tuple(sorted(sends)), tuple(sorted(receives)))


def _ring(rank: int, world_size: int, round: int, seed: int) -> set[int]:
    return {(rank + 1) % world_size, (rank - 1) % world_size} - {rank}


def _torus(rank: int, world_size: int, round: int, seed: int) -> set[int]:
    rows, columns = _sides(world_size)
    row, column = divmod(rank, columns)
    near = {((row + step) % rows, column) for step in (1, -1)} | {(row, (column + step) % columns) for step in (1, -1)}
    return {r * columns + c for r, c in near} - {rank}


def _exponential(rank: int, world_size: int, round: int, seed: int) -> set[int]:
    return {(rank + 2**level) % world_size for level in range((world_size - 1).bit_length())}


def _one_peer_exponential(rank: int, world_size: int, round: int, seed: int) -> set[int]:
    levels = (world_size - 1).bit_length()
    return {(rank + 2 ** (round % levels)) % world_size} if levels else set()


def _fast_pair(rank: int, world_size: int, round: int, seed: int) -> set[int]:
    return _partner(_equal_links(world_size), rank, round)


def _partner(cycle: Sequence[Partners], rank: int, round: int) -> set[int]:
    return {cycle[round % len(cycle)][rank]} - {rank}


def _random_pair(rank: int, world_size: int, round: int, seed: int) -> set[int]:
    return {_matching(world_size, round, seed)[rank]} - {rank}


def _random_target(rank: int, world_size: int, round: int, seed: int) -> set[int]:
    return {_draws(world_size, round, seed)[rank]} - {rank}


@lru_cache(maxsize=64)
def _sides(world_size: int) -> tuple[int, int]:
    """The most nearly square grid."""
    rows = max(side for side in range(1, math.isqrt(world_size) + 1) if world_size % side == 0)
    return rows, world_size // rows


@lru_cache(maxsize=64)
def _equal_links(world_size: int) -> tuple[Partners, ...]:
    return fast_pairs(((1.0,) * world_size,) * world_size)


@lru_cache(maxsize=64)
def _matching(world_size: int, round: int, seed: int) -> tuple[int, ...]:
    """Partners drawn at random, the same on every rank; with an odd number one has no partner."""
    order: list[int] = torch.randperm(world_size, generator=_generator(round, seed)).tolist()
    partners = list(range(world_size))
    for left, right in zip(order[::2], order[1::2], strict=False):
        partners[left], partners[right] = right, left
    return tuple(partners)


@lru_cache(maxsize=64)
def _draws(world_size: int, round: int, seed: int) -> tuple[int, ...]:
    """For each rank another one, drawn at random; several may draw the same."""
    if world_size == 1:
        return (0,)
    steps = torch.randint(1, world_size, (world_size,), generator=_generator(round, seed)).tolist()
    return tuple((rank + step) % world_size for rank, step in enumerate(steps))


def _generator(round: int, seed: int) -> torch.Generator:
    # Mixed first: a generator on a CPU uses only 32 bits of its seed.
    mixed = hashlib.blake2b(f"{seed} {round}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "big"))


RING = Topology("ring", fixed=True, symmetric=True, balanced=True, targets=_ring)
TORUS = Topology("torus", fixed=True, symmetric=True, balanced=True, targets=_torus)
EXPONENTIAL = Topology("exponential", fixed=True, symmetric=False, balanced=True, targets=_exponential)
ONE_PEER_EXPONENTIAL = Topology(
    "one_peer_exponential", fixed=False, symmetric=False, balanced=True, targets=_one_peer_exponential
)
FAST_PAIRS = Topology("fast_pairs", fixed=False, symmetric=True, balanced=True, targets=_fast_pair)
"""The pairs where all links are equal; see `cycle_of` for links that differ."""
RANDOM_PAIRS = Topology("random_pairs", fixed=False, symmetric=True, balanced=True, targets=_random_pair, draws=True)
RANDOM_TARGETS = Topology(
    "random_targets", fixed=False, symmetric=False, balanced=False, targets=_random_target, draws=True
)

TOPOLOGIES = {
    topology.name: topology
    for topology in (RING, TORUS, EXPONENTIAL, ONE_PEER_EXPONENTIAL, FAST_PAIRS, RANDOM_PAIRS, RANDOM_TARGETS)
}
"""ring: the two next to it. torus: the four around it on a grid. exponential: those at a distance of 1, 2, 4, ...
one_peer_exponential: one of these in turn. fast_pairs: pairs with the fastest links, in turn. random_pairs: new random
pairs in every mixing step. random_targets: each sends to a new random one in every mixing step, whatever the others do.
"""


def cycle_of(rounds: tuple[Partners, ...]) -> Topology:
    """The topology of pairs that follow each other in these rounds, again and again."""
    return replace(FAST_PAIRS, targets=lambda rank, world_size, round, seed: _partner(rounds, rank, round))


def check_seed(where: str, topology: str, seed: int) -> None:
    """Raise InvalidSetting if `seed` is set for a topology that draws nothing."""
    if seed and not TOPOLOGIES[topology].draws:
        raise InvalidSetting(
            f"{where}: seed={seed} has no effect with topology={topology}, which draws nothing. Leave it out, or use a "
            "topology whose name begins with random."
        )


def mixing_matrix(topology: Topology, world_size: int, round: int, seed: int) -> torch.Tensor:
    """W of one round of a balanced topology; raises LaconicError unless its rows and columns add up to one."""
    matrix = torch.zeros(world_size, world_size, dtype=torch.float64)
    for rank in range(world_size):
        part = topology.neighbourhood(rank, world_size, round, seed)
        for peer in (rank, *part.receives):
            matrix[rank, peer] = part.weight
    ones = torch.ones(world_size, dtype=torch.float64)
    for sums, what in ((matrix.sum(0), "column"), (matrix.sum(1), "row")):
        if not torch.allclose(sums, ones, atol=_TOLERANCE):
            raise LaconicError(
                f'topology "{topology.name}" with {world_size} replicas: a {what} of its mixing matrix adds up to '
                f"{sums[(sums - 1).abs().argmax()]:.4g} instead of 1, so the mean of all replicas would drift."
            )
    return matrix
