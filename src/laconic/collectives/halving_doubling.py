"""Recursive halving-doubling: in each step the distance of pairs and the bytes they swap are halved, then doubled."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from laconic.collectives.algorithm import Algorithm, Formula, Leg, anywhere
from laconic.collectives.schedule import Collective, Table, in_turn, no_rows, table_of


@lru_cache(maxsize=64)
def halving_doubling(world_size: int) -> Collective:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling.

        2 log2(n) steps,   2 (n-1)/n N bytes from each rank

    If n is no power of two, each rank r beyond the largest power p first sends everything to rank r - p and in the end
    gets the result from it: two steps and N bytes more.

    Reference: Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521.
    """
    inside = 1 << (world_size.bit_length() - 1)
    guests, everything = np.arange(inside, world_size)[:, None], np.arange(inside)[None, :]
    fold_in = table_of(0, guests, guests - inside, everything, reduce=True)
    fold_out = table_of(0, guests - inside, guests, everything, reduce=False)
    halves = [inside >> level for level in range(1, inside.bit_length())]
    halving = [_swap(inside, half, reduce=True) for half in halves]
    doubling = [_swap(inside, half, reduce=False) for half in reversed(halves)]
    rows = in_turn(fold_in, *halving, *doubling, fold_out) if world_size > 1 else no_rows()
    return Collective.of("halving_doubling", world_size, inside, rows)


def _swap(inside: int, half: int, *, reduce: bool) -> Table:
    """Pairs at distance `half` swap that many chunks: if `reduce`, each sends its peer's block, otherwise its own."""
    ranks, chunks = np.arange(inside)[:, None], np.arange(half)[None, :]
    peers = ranks ^ half
    block = (peers if reduce else ranks) // half * half
    return table_of(0, ranks, peers, block + chunks, reduce=reduce)


def _formula(world_size: int, ranks_per_host: int) -> Formula:
    """A leg for each distance: on a tree of switches the long ones share links."""
    inside = 1 << (world_size.bit_length() - 1)
    halves = [1 << level for level in range(inside.bit_length() - 1)]
    legs = tuple(Leg(2, 2 * half / inside, "swap", half) for half in halves)
    return Formula((*legs, Leg(2, 2.0)) if world_size > inside else legs)


HALVING_DOUBLING = Algorithm(name="halving_doubling", rows=anywhere(halving_doubling), formula=_formula)
