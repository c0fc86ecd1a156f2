"""Hierarchical all-reduce: inside each host, then between hosts, then inside each host again."""

from __future__ import annotations

from functools import lru_cache

from laconic.collectives.algorithm import Algorithm, Formula, Leg
from laconic.collectives.passes import across, ring_all_gather, ring_reduce_scatter, tree_broadcast, tree_reduce
from laconic.collectives.ring import ring_formula
from laconic.collectives.schedule import Collective, in_turn, side_by_side
from laconic.core.hosts import Hosts


@lru_cache(maxsize=64)
def hierarchical(hosts: Hosts) -> Collective:
    """Sum inside the host, all-reduce between hosts, distribute inside the host.

        equally many ranks k on each of h hosts:  2 (k-1) + 2 (h-1) steps,   2 (n-1)/n N bytes from each rank
        else, over the first rank of each host:   2 ceil(log2 k) + 2 (h-1) steps,   2 (h-1)/h N between hosts

    With equal hosts each rank carries its own share between hosts: no link carries more than 2 (h-1)/h N/k.

    Reference: Jia et al. 2018, arXiv:1807.11205.
    """
    world_size = sum(map(len, hosts))
    if len({len(host) for host in hosts}) == 1:
        return Collective.of("hierarchical", world_size, world_size, across(hosts))
    leaders = [host[0] for host in hosts]
    pieces = [[chunk] for chunk in range(len(hosts))]
    between = in_turn(ring_reduce_scatter(leaders, pieces), ring_all_gather(leaders, pieces))
    table = in_turn(to_leaders(hosts).table, between, from_leaders(hosts).table)
    return Collective.of("hierarchical", world_size, len(hosts), table)


@lru_cache(maxsize=64)
def to_leaders(hosts: Hosts) -> Collective:
    """The first part alone: the first rank of each host ends with the sum of its host, in every chunk."""
    table = side_by_side([tree_reduce(host, range(len(hosts))) for host in hosts])
    return Collective.of("to_leaders", sum(map(len, hosts)), len(hosts), table)


@lru_cache(maxsize=64)
def from_leaders(hosts: Hosts) -> Collective:
    """The last part alone: all ranks of a host end with the values of its first rank, in every chunk."""
    table = side_by_side([tree_broadcast(host, range(len(hosts))) for host in hosts])
    return Collective.of("from_leaders", sum(map(len, hosts)), len(hosts), table)


def _formula(world_size: int, ranks_per_host: int) -> Formula:
    """Legs inside hosts, between hosts, inside again; between hosts each rank sends a part, or one per host all."""
    each = min(ranks_per_host, world_size)
    between = ring_formula(-(-world_size // each))
    if world_size % each:
        depth = (each - 1).bit_length()
        there = back = Leg(depth, depth, "inside", each)
        across = Leg(between.num_steps, between.serial_ratio, "shift", every=each)
    else:
        there = back = Leg(each - 1, (each - 1) / each, "inside", each)
        across = Leg(between.num_steps, between.serial_ratio / each, "shift", each)
    return Formula(tuple(leg for leg in (there, across, back) if leg.num_steps))


def _unfit(hosts: Hosts) -> str | None:
    world_size = sum(map(len, hosts))
    if world_size > 1 and len(hosts) == 1:
        return f"all {world_size} ranks are on one host"
    if world_size > 1 and len(hosts) == world_size:
        return f"each of the {world_size} ranks has a host to itself"
    return None


HIERARCHICAL = Algorithm(name="hierarchical", rows=hierarchical, formula=_formula, by_host=True, unfit=_unfit)
