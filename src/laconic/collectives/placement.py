"""Groups of ranks that are fast among themselves, and a good order around a ring, from measured rates of pairs.

Every rank begins as a group of its own. In each step, the two groups whose pairs have the highest mean rate join
(geometric mean; average linkage). Rates at which groups join fall slowly inside a rack and drop where racks join each
other:

    groups = those before the largest drop,   if the rate drops there by a quarter or more
    order  = the last group, in which every group that was ever formed is a stretch of neighbours

So a ring in that order enters and leaves every rack once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from laconic.core.hosts import Hosts, Pairs
from laconic.errors import LaconicError

_LEAST_DROP = 1.33
"""Rates at which groups join must drop by this factor to tell groups apart: less may be chance."""


@dataclass(frozen=True)
class Placement:
    """Where ranks are, as inferred from rates of pairs."""

    groups: Hosts
    """Ranks that are clearly faster among themselves than with others, in the order of the ring; one group if none."""
    drop: float
    """Rate inside the groups over rate between them; 1 if there is one group."""


def placement_of(pairs: Pairs) -> Placement:
    """Groups and their order; ranks that have the same measurements get the same result."""
    rates = np.array(pairs, dtype=np.float64)
    size = len(rates)
    if rates.shape != (size, size) or not np.all(rates[~np.eye(size, dtype=bool)] > 0):
        raise LaconicError(f"rates of pairs must be a square table of positive numbers, got one of {rates.shape}.")
    history, joined = _joined(rates)
    order = {rank: place for place, rank in enumerate(history[-1][0])}
    drops = [before - after for before, after in pairwise(joined)]
    if not drops or max(drops) < np.log(_LEAST_DROP):
        return Placement(tuple(history[-1]), 1.0)
    cut = int(np.argmax(drops))
    groups = sorted(history[cut + 1], key=lambda group: order[group[0]])
    return Placement(tuple(groups), float(np.exp(drops[cut])))


def _joined(rates: npt.NDArray[np.float64]) -> tuple[list[list[tuple[int, ...]]], list[float]]:
    """The groups that there are after each step, and the logarithm of the rate at which two of them join next."""
    size = len(rates)
    # The slower direction counts: everything waits for the slowest.
    mean = np.log(np.minimum(rates, rates.T) + np.eye(size))
    np.fill_diagonal(mean, -np.inf)
    groups: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in range(size)}
    history, joined = [list(groups.values())], list[float]()
    while len(groups) > 1:
        # Rounded, so that of groups that are equally close the first ones join, whatever the last bits say.
        first, second = sorted(map(int, np.unravel_index(int(np.argmax(np.round(mean, 9))), mean.shape)))
        joined.append(float(mean[first, second]))
        weights = len(groups[first]), len(groups[second])
        mean[first] = mean[:, first] = np.average(mean[[first, second]], axis=0, weights=weights)
        mean[first, first] = mean[second] = mean[:, second] = -np.inf
        groups[first] += groups.pop(second)
        history.append(list(groups.values()))
    return history, joined


def placed(hosts: Hosts, pairs: Pairs) -> Hosts:
    """The groups by which sums are formed: those that were measured, else the hosts; in the order of the ring."""
    found = placement_of(pairs) if pairs else Placement((), 1.0)
    return found.groups if len(found.groups) > 1 else hosts


def groups_in_words(groups: Hosts) -> str:
    """E.g. "0 2 4 | 1 3 5"."""
    return " | ".join(" ".join(map(str, group)) for group in groups)
