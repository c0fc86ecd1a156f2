"""Pairs of replicas with the fastest links, chosen such that values still spread to all replicas.

    s_ij = min(bits per second from i to j, and from j to i); classes of links, the fastest first;
           a link at least half as fast as the fastest of its class counts as equal to it
    tree = the spanning tree of all replicas with the fastest links: its slowest one is as fast as can be
    a round = each link of the tree that was not used yet and whose ends are free, the slowest first;
              then of other free pairs that are no slower, the fastest, and of equal ones those that met least often
    rounds follow each other until every link of the tree was used, and begin again

The links of the tree connect all replicas, so what one has learned reaches all others within a few cycles. Slow links
that are needed are put into the same rounds, so that the others are fast. Where all links are equal and the number of
replicas is a power of two, a cycle is a hypercube: it ends with the exact mean.

Reference: Tang et al. 2020 (SAPS-PSGD), arXiv:2002.09692, which draws the matchings and keeps track of the pairs that
were matched lately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Partners = tuple[int, ...]
"""For each replica its partner in a round; itself: it has none."""
Speeds = Sequence[Sequence[float]]
"""Bits per second from each replica (row) to each other (column)."""
_Pair = tuple[int, int]


def fast_pairs(speeds: Speeds) -> tuple[Partners, ...]:
    """The rounds of a cycle."""
    size = len(speeds)
    slowness = _slowness(speeds)
    pairs = sorted(slowness, key=lambda pair: (slowness[pair], _apart(pair)))
    left, cycle = list(_spanning_tree(size, pairs)), list[Partners]()
    met = dict.fromkeys(pairs, 0)
    while left:
        partners = list(range(size))
        needed = _add(partners, sorted(left, key=lambda pair: -slowness[pair]))
        slowest = max(slowness[pair] for pair in needed)
        others = [pair for pair in pairs if slowness[pair] <= slowest]
        for pair in needed + _add(partners, sorted(others, key=lambda pair: (slowness[pair], met[pair]))):
            met[pair] += 1
        left = [pair for pair in left if pair not in needed]
        cycle.append(tuple(partners))
    return tuple(cycle) or (tuple(range(size)),)


def _slowness(speeds: Speeds) -> dict[_Pair, int]:
    """For each pair the class of its link: 0 is the fastest link and those at least half as fast, and so on.

    A class begins where links become slow, not at a fixed speed, so noise does not divide links that are alike.
    """
    size = len(speeds)
    both = {(i, j): min(speeds[i][j], speeds[j][i]) for i in range(size) for j in range(i + 1, size)}
    slowness: dict[_Pair, int] = {}
    number, fastest = -1, math.inf
    for pair in sorted(both, key=lambda pair: -both[pair]):
        if both[pair] < fastest / 2:
            number, fastest = number + 1, both[pair]
        slowness[pair] = number
    return slowness


def _apart(pair: _Pair) -> tuple[bool, int, int]:
    """The order of equal links: ranks that differ in one binary digit first, which makes hypercubes."""
    digits = pair[0] ^ pair[1]
    return digits.bit_count() > 1, digits, pair[0]


def _add(partners: list[int], pairs: Sequence[_Pair]) -> list[_Pair]:
    """Match the pairs whose ends are both free, in this order; returns those that were matched."""
    made: list[_Pair] = []
    for i, j in pairs:
        if partners[i] == i and partners[j] == j:
            partners[i], partners[j] = j, i
            made.append((i, j))
    return made


def _spanning_tree(size: int, fastest_first: Sequence[_Pair]) -> Iterator[_Pair]:
    """Kruskal's algorithm, from the fastest link on."""
    part = list(range(size))
    for i, j in fastest_first:
        if part[i] != part[j]:
            yield i, j
            part = [part[i] if other == part[j] else other for other in part]


def in_words(cycle: Sequence[Partners]) -> str:
    """The pairs of each round: 0-1 2-3, 0-2 1-3."""
    rounds = ([f"{i}-{j}" for i, j in enumerate(partners) if i < j] for partners in cycle)
    return ", ".join(" ".join(pairs) for pairs in rounds)
