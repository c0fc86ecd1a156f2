"""When jobs that share a link should begin, so that they communicate in turns.

Each job repeats a period: it computes, then keeps the link busy for a while. On a circle whose circumference is
a multiple of all periods, jobs are shifted against each other until as little as possible of their simultaneous traffic
exceeds the capacity of the link:

    minimize over shifts   sum over times t of  max(0, sum over jobs of u_j(t - shift_j) - 1)

u_j(t) is the share of the link that job j would use if it were alone. Jobs take their best shift in turn, again and
again, until no job gains.

Reference: Rajasekaran et al. 2024 (CASSINI), NSDI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from laconic.cluster.fabric import Floats
from laconic.errors import UsageError

_PLACES = 720
"""Places on the circle per longest period: shifts are whole numbers of places."""
_MOST_PERIODS = 8
"""Longest periods that the circle may hold: periods without a common multiple up to that are taken not to fit."""
_PASSES = 8


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """The traffic of a job on a link in each of its steps, if it is alone there."""

    period_s: float
    """How long a step takes."""
    begin_s: float
    """When it begins to communicate, counted from the beginning of the step."""
    busy_s: float
    """For how long it communicates."""
    share: float = 1.0
    """The share of the link that it uses meanwhile."""

    def __post_init__(self) -> None:
        if not (self.period_s > 0 and self.begin_s >= 0 and 0 <= self.busy_s <= self.period_s and 0 < self.share <= 1):
            raise UsageError(
                "period_s must be > 0, begin_s >= 0, busy_s between 0 and period_s, and share above 0 and at most 1, "
                f"got {self}."
            )


@dataclass(frozen=True, eq=False)
class Interleaving:
    """Shifts of jobs against each other."""

    start_s: tuple[float, ...]
    """The delay after which each job begins; 0 for the first."""
    excess: float
    """Share of all traffic that exceeds the capacity of the link when it is sent; 0: jobs take turns."""


def interleave(rhythms: Sequence[Rhythm]) -> Interleaving:
    """When each of these jobs should begin."""
    if not rhythms:
        return Interleaving((), 0.0)
    place_s = max(rhythm.period_s for rhythm in rhythms) / _PLACES
    periods = [max(1, round(rhythm.period_s / place_s)) for rhythm in rhythms]
    size = min(lcm(*periods), _MOST_PERIODS * _PLACES)
    used = [_on_circle(rhythm, period, size) for rhythm, period in zip(rhythms, periods, strict=True)]
    shifts, load = [0] * len(used), np.sum(used, axis=0)
    for _ in range(_PASSES):
        before = list(shifts)
        for job in range(1, len(used)):
            load = load - np.roll(used[job], shifts[job])
            shifts[job] = _best(load, used[job], periods[job])
            load = load + np.roll(used[job], shifts[job])
        if shifts == before:
            break
    sent = float(np.sum(used))
    excess = float(np.maximum(0.0, load - 1).sum())
    return Interleaving(tuple(shift * place_s for shift in shifts), excess / sent if sent else 0.0)


def _on_circle(rhythm: Rhythm, period: int, size: int) -> Floats:
    """Share of the link that a job uses at each place, period after period."""
    place_s = rhythm.period_s / period
    at = (np.arange(size) % period + 0.5) * place_s
    since_s = (at - rhythm.begin_s) % rhythm.period_s
    return np.where(since_s < rhythm.busy_s, rhythm.share, 0.0)


def _best(load: Floats, used: Floats, period: int) -> int:
    """The shift with the least excess; among equals the one whose neighbours are best too, then the first.

    Steps vary a little: a job in the middle of a gap stays clear of others on both sides.
    """
    shifted = used[(np.arange(len(used)) - np.arange(period)[:, None]) % len(used)]
    excess: Floats = np.maximum(0.0, load + shifted - 1).sum(axis=1)
    nearby = np.convolve(np.concatenate([excess[-period:], excess, excess[:period]]), np.ones(2 * (period // 12) + 1))
    middle = period + period // 12
    return int(np.lexsort((np.round(nearby[middle : middle + period], 6), np.round(excess, 6)))[0])
