"""What algorithms cost among equal ranks, however many: the price of their rows without writing these down.

algorithm           steps                        bytes one after the other, as a multiple of N
ring                2 (n-1)                      2 (n-1)/n
tree                2 ceil(log2 n)               2 ceil(log2 n)
double_tree         2 ceil(log2 n) + 3           1.125 + ceil(log2 n) / 2      n > 4; four pieces per half
halving_doubling    2 log2 p + 2 if n > p        2 (p-1)/p + 2 if n > p        p: the largest power of two
torus2d             2 (rows + columns - 2)       2 (n-1)/n
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from laconic.collectives.torus2d import grid


@dataclass(frozen=True)
class Formula:
    """t = num_steps alpha + serial_ratio N beta."""

    num_steps: int
    serial_ratio: float


def formula(algorithm: str, world_size: int) -> Formula:
    """The cost of an all-reduce among `world_size` ranks that have a host and a link each."""
    n = world_size
    if n == 1:
        return Formula(0, 0.0)
    depth = ceil(log2(n))
    if algorithm in {"ring", "native"}:
        return Formula(2 * (n - 1), 2 * (n - 1) / n)
    if algorithm == "tree":
        return Formula(2 * depth, 2.0 * depth)
    if algorithm == "double_tree":
        small = {2: 1.0, 3: 1.875, 4: 2.25}
        return Formula(2 * depth + 3, small.get(n, 1.125 + depth / 2))
    if algorithm == "halving_doubling":
        inside = 1 << (n.bit_length() - 1)
        extra = 2 if n > inside else 0
        return Formula(2 * (inside.bit_length() - 1) + extra, 2 * (inside - 1) / inside + extra)
    if algorithm == "torus2d":
        rows, columns = grid(n)
        return Formula(2 * (rows - 1) + 2 * (columns - 1), 2 * (n - 1) / n)
    raise AssertionError(f"no formula for {algorithm}")
