"""The building blocks of algorithms: passes around a ring, across a grid, up and down a tree.

Each gives rows from step 0 on, for members of any ranks and chunks of any numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from laconic.collectives.schedule import Table, in_turn, no_rows, side_by_side, table_of


def ring_reduce_scatter(members: Sequence[int], pieces: Sequence[Sequence[int]]) -> Table:
    """Member i ends with the sum of all in the chunks pieces[i], after k - 1 steps.

    In step s member i sends piece i - s - 1 to the next one, which adds it to its own.
    """
    return _around(members, pieces, lead=1, reduce=True)


def ring_all_gather(members: Sequence[int], pieces: Sequence[Sequence[int]]) -> Table:
    """All members end with member i's values in the chunks pieces[i], after k - 1 steps.

    In step s member i sends piece i - s to the next one.
    """
    return _around(members, pieces, lead=0, reduce=False)


def _around(members: Sequence[int], pieces: Sequence[Sequence[int]], *, lead: int, reduce: bool) -> Table:
    ranks, chunks = np.asarray(members), np.asarray(pieces)
    count = len(ranks)
    if count == 1:
        return no_rows()
    step, place = np.divmod(np.arange((count - 1) * count)[:, None], count)
    piece = (place - step - lead) % count
    return table_of(step, ranks[place], ranks[(place + 1) % count], chunks[piece[:, 0]], reduce=reduce)


def across(rows: Sequence[Sequence[int]]) -> Table:
    """Rings along equally long rows, then along the columns that they form, then along the rows again.

    Of rows * columns chunks, piece c of a row has the chunks c * rows <= chunk < (c + 1) * rows; the r-th of these is
    complete at rank rows[r][c] before it is distributed.
    """
    height, width = len(rows), len(rows[0])
    pieces = [range(column * height, (column + 1) * height) for column in range(width)]
    columns = [[row[column] for row in rows] for column in range(width)]
    single = [[[chunk] for chunk in piece] for piece in pieces]
    return in_turn(
        side_by_side([ring_reduce_scatter(row, pieces) for row in rows]),
        side_by_side([ring_reduce_scatter(*pair) for pair in zip(columns, single, strict=True)]),
        side_by_side([ring_all_gather(*pair) for pair in zip(columns, single, strict=True)]),
        side_by_side([ring_all_gather(row, pieces) for row in rows]),
    )


def tree_reduce(members: Sequence[int], chunks: Sequence[int]) -> Table:
    """The first member ends with the sum of all, after ceil(log2 k) steps.

    In step s every member whose number is an odd multiple of 2^s sends to the one 2^s before it.
    """
    return side_by_side([_level(members, chunks, level, step=level, up=True) for level in range(_depth(members))])


def tree_broadcast(members: Sequence[int], chunks: Sequence[int]) -> Table:
    """All members end with the first one's values, after ceil(log2 k) steps: tree_reduce backwards."""
    depth = _depth(members)
    return side_by_side([_level(members, chunks, level, step=depth - 1 - level, up=False) for level in range(depth)])


def _depth(members: Sequence[int]) -> int:
    return (len(members) - 1).bit_length()


def _level(members: Sequence[int], chunks: Sequence[int], level: int, *, step: int, up: bool) -> Table:
    ranks, distance = np.asarray(members), 1 << level
    lower = np.arange(distance, len(ranks), 2 * distance)[:, None]
    below, above = ranks[lower], ranks[lower - distance]
    source, destination = (below, above) if up else (above, below)
    return table_of(step, source, destination, np.asarray(chunks)[None, :], reduce=up)
