"""Prices are those of the catalogue of costs."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

from laconic.collectives import ALGORITHMS, Collective
from laconic.collectives.price import price
from laconic.collectives.schedule import chunk_bounds
from laconic.collectives.torus2d import grid
from tests.collectives.layouts import collective, every_algorithm, hosts_of_size

N = 16 * math.lcm(*range(1, 17))
"""Bytes that can be cut into 2 to 16 equal chunks."""
every_size = pytest.mark.parametrize("n", range(2, 17))


def cost(made: Collective) -> tuple[int, float, float]:
    """Steps, bytes from the busiest rank and bytes one after the other, in units of N."""
    found = price(made, N)
    return found.num_steps, found.busiest_bytes / N, found.serial_bytes / N


@every_size
def test_ring(n: int) -> None:
    """2 (n-1) alpha, 2 (n-1)/n N; every rank sends the same."""
    steps, busiest, serial = cost(collective("ring", n))
    assert steps == 2 * (n - 1)
    assert busiest == serial == pytest.approx(2 * (n - 1) / n, rel=1e-12)
    assert len(set(price(collective("ring", n), N).sent_bytes)) == 1


@every_size
def test_halving_doubling(n: int) -> None:
    """2 log2(n) alpha, 2 (n-1)/n N; if n is no power of two, two steps and N more among the largest power p."""
    steps, busiest, serial = cost(collective("halving_doubling", n))
    p = 2 ** int(math.log2(n))
    folded = n > p
    assert steps == 2 * math.log2(p) + 2 * folded
    assert busiest == pytest.approx(2 * (p - 1) / p + folded, rel=1e-12)
    assert serial == pytest.approx(2 * (p - 1) / p + 2 * folded, rel=1e-12), "what is handed over waits on both ends"


@every_size
def test_tree(n: int) -> None:
    """2 log2(n) alpha, 2 N log2(n) unpipelined: N in each step, one after the other; log2 is rounded up."""
    steps, busiest, serial = cost(collective("tree", n))
    assert steps == 2 * math.ceil(math.log2(n))
    assert serial == 2 * math.ceil(math.log2(n))
    assert busiest == math.ceil(math.log2(n)), "the root sends in each step of the way back"


@every_size
def test_double_tree(n: int) -> None:
    """About 2 log2(n) alpha, about 2N: 3 steps more to keep four pieces moving, and 2N at most."""
    steps, busiest, _ = cost(collective("double_tree", n))
    assert 2 * math.floor(math.log2(n)) <= steps - 3 <= 2 * math.ceil(math.log2(n))
    assert busiest <= 2
    if n >= 4:
        assert busiest == 2, "half of it up in each tree, the other half down to two children"


@every_size
def test_torus2d(n: int) -> None:
    """4 (sqrt(n)-1) alpha, about 2N: in a square exactly these steps, and 2 (n-1)/n N in any grid."""
    steps, busiest, serial = cost(collective("torus2d", n))
    rows, columns = grid(n)
    assert rows * columns == n
    assert steps == 2 * (rows - 1) + 2 * (columns - 1)
    if math.isqrt(n) ** 2 == n:
        assert steps == 4 * (math.sqrt(n) - 1)
    assert busiest == serial == pytest.approx(2 * (n - 1) / n, rel=1e-12)


@pytest.mark.parametrize(("num_hosts", "each"), [(2, 2), (3, 4), (4, 2), (4, 4)])
def test_hierarchical_between_hosts(num_hosts: int, each: int) -> None:
    """Between hosts each rank sends 2 (h-1)/h of its share of N."""
    n = num_hosts * each
    made = ALGORITHMS["hierarchical"](hosts_of_size(n, each))
    steps, busiest, _ = cost(made)
    assert steps == 2 * (num_hosts - 1) + 2 * (each - 1)
    assert busiest == pytest.approx(2 * (n - 1) / n, rel=1e-12)
    sizes = [stop - start for start, stop in pairwise(chunk_bounds(N, made.num_chunks))]
    crossing: Counter[int] = Counter()
    for row in made.rows():
        if row.source // each != row.destination // each:
            crossing[row.source] += sizes[row.chunk]
    assert [crossing[rank] for rank in range(n)] == [2 * (num_hosts - 1) * N // (num_hosts * each)] * n


def test_hierarchical_with_unequal_hosts_sends_between_hosts_once() -> None:
    made = ALGORITHMS["hierarchical"](((0, 1, 2), (3,)))
    found = price(made, N)
    assert found.sent_bytes == (N + 2 * N, N, N, N)
    assert found.num_steps == 2 + 2 + 2


@every_algorithm
def test_bytes_sent_are_bytes_received_and_none_is_lost_in_rounding(algorithm: str) -> None:
    for n in (1, 2, 3, 5, 8):
        made = collective(algorithm, n)
        for nbytes in (0, 1, 2, 15, 17, 1000, 4099):
            bounds = chunk_bounds(nbytes, made.num_chunks)
            assert bounds[0] == 0
            assert bounds[-1] == nbytes
            assert list(bounds) == sorted(bounds)
            sizes = [stop - start for start, stop in pairwise(bounds)]
            assert sum(price(made, nbytes).sent_bytes) == sum(sizes[row.chunk] for row in made.rows())


def test_one_rank_pays_nothing() -> None:
    for algorithm in ALGORITHMS:
        found = price(collective(algorithm, 1), N)
        assert (found.num_steps, found.sent_bytes, found.serial_bytes) == (0, (0,), 0)
