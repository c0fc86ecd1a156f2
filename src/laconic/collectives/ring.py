"""Ring all-reduce: chunks go around once to be summed, and once more to be distributed."""

from __future__ import annotations

from functools import lru_cache

from laconic.collectives.algorithm import Algorithm, Formula, Leg, anywhere
from laconic.collectives.passes import ring_all_gather, ring_reduce_scatter
from laconic.collectives.schedule import Collective, in_turn


@lru_cache(maxsize=64)
def ring(world_size: int) -> Collective:
    """A reduce-scatter around the ring, then an all-gather.

        2 (n-1) steps,   2 (n-1)/n N bytes from each rank

    The fewest bytes an all-reduce can send, in the most steps; every rank communicates with its two neighbours only.

    Reference: Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    members = range(world_size)
    pieces = [[chunk] for chunk in members]
    rows = in_turn(ring_reduce_scatter(members, pieces), ring_all_gather(members, pieces))
    return Collective.of("ring", world_size, world_size, rows)


def ring_formula(world_size: int, ranks_per_host: int = 1) -> Formula:
    """2 (n-1) messages of N / n bytes, one after the other."""
    return Formula((Leg(2 * (world_size - 1), 2 * (world_size - 1) / world_size),))


RING = Algorithm(name="ring", rows=anywhere(ring), formula=ring_formula, same_messages=True, least_ranks=2)
