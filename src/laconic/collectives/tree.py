"""Tree all-reduce: sums move up a tree, the result moves down."""

from __future__ import annotations

from functools import lru_cache

from laconic.collectives.algorithm import Algorithm, Formula, Leg, anywhere
from laconic.collectives.passes import tree_broadcast, tree_reduce
from laconic.collectives.schedule import Collective, in_turn


@lru_cache(maxsize=64)
def tree(world_size: int) -> Collective:
    """In pairs, then pairs of pairs, one rank sends its sum to the other; the result takes the same way back.

        2 ceil(log2 n) steps,   N bytes over one link in each:  2 N ceil(log2 n) one after the other

    The whole tensor moves in every step, so this is for small tensors. The tree is binomial: no rank receives two
    tensors in one step.

    Reference: Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521.
    """
    members = range(world_size)
    return Collective.of("tree", world_size, 1, in_turn(tree_reduce(members, [0]), tree_broadcast(members, [0])))


def _formula(world_size: int, ranks_per_host: int) -> Formula:
    depth = (world_size - 1).bit_length()
    return Formula((Leg(2 * depth, 2.0 * depth),))


TREE = Algorithm(name="tree", rows=anywhere(tree), formula=_formula, least_ranks=2)
