"""Divides the samples of a step among replicas: equally, or so that all finish at about the same time.

A replica is on one rank, or on several if the model is sharded. Ranks that FSDP averages gradients over divide the part
of their replica equally, as FSDP gives all of them the same weight; ranks of tensor parallelism use the same samples.

Speeds, in samples per second, are exchanged in the vote that ends every unit. The speeds of one vote are used after the
next unit, so that a rank that has missed the last vote divides as all others do. When the set of ranks changes, the
last speeds are dropped, because some ranks may have missed them.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_EVERY = 8
"""Units between two divisions: each change restarts the workers of a DataLoader."""
_CHANGE = 0.05
"""The division stays while no rank's share would change by more than this fraction."""
_LATEST = 0.5
"""Weight of the latest measurement in a rank's speed."""


@dataclass(frozen=True)
class Reader:
    """One rank of a replica, and the part of the replica's samples that it uses."""

    index: int = 0
    count: int = 1
    """The number of parts."""

    def first(self, number: int) -> int:
        """The position of this rank's first sample among so many of its replica."""
        return self.index * self.share(number)

    def share(self, number: int) -> int:
        """This rank's number of samples, out of so many of its replica."""
        return number // self.count

    def own(self, samples: list[int]) -> list[int]:
        """This rank's samples, out of those of its replica."""
        begin = self.first(len(samples))
        return samples[begin : begin + self.share(len(samples))]


@dataclass(frozen=True)
class Split:
    """The replicas among which the samples of a step are divided."""

    members: tuple[str, ...]
    speeds: tuple[int, ...] = ()
    """Speeds in thousandths of a sample per second; empty: all are equal."""
    unit: int = 1
    """Every replica gets a multiple of this number of samples."""

    @property
    def least(self) -> int:
        """The samples of a step are a multiple of `unit`, and at least so many: with fewer, a rank would have none."""
        return self.unit * len(self.members)

    def parts(self, samples: list[int]) -> list[list[int]]:
        """The samples of each replica, in order; those above a multiple of `unit` are left out."""
        found = sizes(len(samples) // self.unit, len(self.members), self.speeds)
        bounds = [0, *accumulate(self.unit * size for size in found)]
        return [samples[begin:end] for begin, end in pairwise(bounds)]


@functools.lru_cache(maxsize=64)
def sizes(count: int, num_ranks: int, speeds: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The number of samples of each rank, out of `count`: at least one if there are enough.

    Without speeds they differ by at most one. With speeds the last rank finishes as early as possible.
    """
    if not speeds or count < num_ranks:
        bounds = [rank * count // num_ranks for rank in range(num_ranks + 1)]
        return tuple(end - begin for begin, end in pairwise(bounds))
    found = [1] * num_ranks
    ends = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(count - num_ranks):
        _, rank = ends[0]
        found[rank] += 1
        heapq.heapreplace(ends, ((found[rank] + 1) / speeds[rank], rank))
    return tuple(found)


class Speeds:
    """The speeds of all replicas: the same on all ranks that divide samples together."""

    def __init__(self, *, unit: int = 1) -> None:
        """unit: as in Split."""
        self._unit = unit
        self.used: dict[str, int] = {}
        """The speeds by which samples are divided."""
        self._said: dict[str, int] = {}
        self._own = 0.0
        self._began_s: float | None = None

    def handed_out(self, now_s: float) -> None:
        """This rank gets a batch; timing starts with the first batch of a unit."""
        if self._began_s is None:
            self._began_s = now_s

    def came(self, now_s: float, samples: int) -> None:
        """This rank has finished its samples of a unit."""
        if self._began_s is not None and now_s > self._began_s and samples:
            latest = samples / (now_s - self._began_s)
            self._own = _LATEST * latest + (1 - _LATEST) * self._own if self._own else latest
        self._began_s = None

    @property
    def own(self) -> int:
        """The speed that this rank reports in the vote; 0: unknown."""
        return round(1000 * self._own)

    def unit_done(self, unit: int, heard: Mapping[str, int]) -> None:
        """A unit is done; `heard`: the speeds from its vote, empty if this rank has missed it."""
        if unit % _EVERY == 0 and self._said and _differ(self.used, self._said):
            self.used = dict(self._said)
        self._said = dict(heard) if all(heard.values()) else {}

    def view_changed(self) -> None:
        """Drop the speeds that some ranks may have missed."""
        self._said = {}

    def split(self, members: Sequence[str]) -> Split:
        """The division among these ranks; ranks of unknown speed count as fast as the others."""
        known = [self.used[name] for name in members if name in self.used]
        if not known:
            return Split(tuple(members), unit=self._unit)
        mean = max(1, sum(known) // len(known))
        return Split(tuple(members), tuple(self.used.get(name, mean) for name in members), self._unit)


def _differ(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Whether some rank's share of the whole differs enough to divide anew."""
    if set(before) != set(now):
        return True
    whole_before, whole_now = sum(before.values()), sum(now.values())
    return any(abs(now[name] / whole_now * whole_before / before[name] - 1) > _CHANGE for name in now)
