"""Double binary tree: two trees carry half the tensor each, and a leaf in one is an inner node in the other."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from laconic.collectives.algorithm import Algorithm, Formula, Leg, anywhere
from laconic.collectives.schedule import Collective, Table, no_rows, side_by_side, table_of

_PIECES = 4
"""Pieces of each half that follow each other through its tree; more would fill links better and cost a step each."""


@lru_cache(maxsize=64)
def double_tree(world_size: int) -> Collective:
    """Pieces of each half move up its binary tree one behind the other, and down as soon as they are complete.

        2 depth + pieces - 1 steps, depth about log2 n;   2 N bytes at most from each rank

    A tree of n ranks in order has its leaves at the odd places. The second tree is the first in reverse (n even) or
    shifted by one position (n odd), so that a rank with two children in one tree has none in the other.

    Reference: Sanders, Speck & Traeff 2009, doi:10.1016/j.parco.2009.09.001.
    """
    parents = _parents(world_size)
    places = np.arange(world_size)
    mirrored = places[::-1] if world_size % 2 == 0 else (places + 1) % world_size
    rows = [_up_and_down(parents, places, 0), _up_and_down(parents, mirrored, _PIECES)] if world_size > 1 else []
    return Collective.of("double_tree", world_size, 2 * _PIECES, side_by_side(rows))


def _parents(world_size: int) -> list[int]:
    """The parent of each place in a binary tree with root 0, whose leaves are odd; the root is its own parent."""
    found = [0]
    for place in range(1, world_size):
        lowest = place & -place
        above = (place ^ lowest) | (lowest << 1)
        found.append(above if above < world_size else place ^ lowest)
    return found


def _up_and_down(parents: list[int], ranks: np.ndarray, first_chunk: int) -> Table:
    """Piece p leaves a place of depth d upwards in step p + deepest - d, and reaches it in step p + deepest + d - 1.

    These are never the same step, and a piece that arrives in one leaves in the next.
    """
    depths = [0] * len(parents)
    for place in range(1, len(parents)):
        above = place
        while above:
            above, depths[place] = parents[above], depths[place] + 1
    deepest, piece = max(depths), np.arange(_PIECES)
    rows = [no_rows()]
    for place in range(1, len(parents)):
        child, parent, depth = ranks[place], ranks[parents[place]], depths[place]
        rows.append(table_of(piece + deepest - depth, child, parent, first_chunk + piece, reduce=True))
        rows.append(table_of(piece + deepest + depth - 1, parent, child, first_chunk + piece, reduce=False))
    return side_by_side(rows)


def _formula(world_size: int, ranks_per_host: int) -> Formula:
    """With four pieces per half, (1.125 + depth / 2) N bytes one after the other, except in the smallest trees."""
    depth, small = (world_size - 1).bit_length(), {2: 1.0, 3: 1.875, 4: 2.25}
    steps = 2 * depth + _PIECES - 1
    # Pieces follow each other up two trees: the first of them comes down while the last goes up.
    first_half = (depth + _PIECES - 1) / steps
    return Formula((Leg(steps, small.get(world_size, 1.125 + depth / 2)),), first_half)


DOUBLE_TREE = Algorithm(name="double_tree", rows=anywhere(double_tree), formula=_formula)
