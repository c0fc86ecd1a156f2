"""2D torus: rings along the rows of a grid, then along its columns, then along the rows again."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

from laconic.collectives.algorithm import Algorithm, Formula, Leg, anywhere
from laconic.collectives.passes import across
from laconic.collectives.schedule import Collective
from laconic.core.hosts import Hosts


@lru_cache(maxsize=64)
def torus2d(world_size: int) -> Collective:
    """Reduce-scatter in each row, all-reduce in each column, all-gather in each row.

        2 (rows - 1) + 2 (columns - 1) steps, 4 (sqrt(n) - 1) in a square;   2 (n-1)/n N bytes from each rank

    The grid is the one nearest to a square that n ranks fill; if n is prime it has one row, and this is a ring.

    Reference: Mikami et al. 2018, arXiv:1811.05233.
    """
    rows, columns = grid(world_size)
    table = across([range(row * columns, (row + 1) * columns) for row in range(rows)])
    return Collective.of("torus2d", world_size, world_size, table)


def grid(world_size: int) -> tuple[int, int]:
    """Rows and columns of the grid nearest to a square that `world_size` ranks fill, with no more rows than columns."""
    rows = next(count for count in range(isqrt(world_size), 0, -1) if world_size % count == 0)
    return rows, world_size // rows


def _formula(world_size: int, ranks_per_host: int) -> Formula:
    rows, columns = grid(world_size)
    return Formula((Leg(2 * (rows - 1) + 2 * (columns - 1), 2 * (world_size - 1) / world_size),))


def _unfit(hosts: Hosts) -> str | None:
    world_size = sum(map(len, hosts))
    if world_size > 1 and grid(world_size)[0] == 1:
        return f"{world_size} is a prime, and {world_size} ranks make no grid but a ring"
    return None


TORUS2D = Algorithm(name="torus2d", rows=anywhere(torus2d), formula=_formula, unfit=_unfit)
