"""Moves jobs, so that those slowed down by links get onto fewer hosts and racks.

A job moves if the time it would lose otherwise is several times as long as its start. Where no host has room for a job
that would fit one, jobs on a single GPU, which send nothing, move out of its way: the fewest on one host, and among
these the ones with the longest remaining time. All jobs that move start again in the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from laconic.jobs.pool import GpuPool, Placement, PlacementRule
from laconic.jobs.speeds import Place

_PAYS_OFF = 4.0
"""A job must lose this many times the time of a start on its links before jobs move for it."""


@dataclass(eq=False)
class Moving:
    """Decides which jobs move at the beginning of a round."""

    pool: GpuPool
    places: Mapping[int, Place]
    """Of the jobs that run."""
    rule: PlacementRule
    start_s: float
    """The time that a start on other hosts takes."""
    leave: Callable[[int], None]
    """Takes the GPUs of a job back."""
    rest_s: Callable[[int], float]
    """How long the rest of a job takes, undisturbed."""

    def slow(self) -> list[int]:
        """Jobs on more hosts or racks than they would need."""
        return [
            number
            for number, place in self.places.items()
            if len(place.placement) > -(-place.gpus // self.pool.gpus_per_host)
            or len(self.pool.racks_of(place.placement)) > 1
        ]

    def gather(self, lost_s: Mapping[int, float]) -> None:
        """Let jobs that run move; lost_s: the time that links would cost each for the rest of its work."""
        for number in sorted(lost_s, key=lambda own: -lost_s[own]):
            if lost_s[number] <= _PAYS_OFF * self.start_s:
                return
            place = self.places[number]
            if self._breadth(self._elsewhere(place)) < self._breadth(place.placement):
                self.leave(number)
            elif len(place.placement) > 1:
                self.pool.give_back(place.placement)
                others = self._in_the_way(place.gpus)
                was_free = self.pool.take_again(place.placement)
                assert was_free, "nobody else has taken these GPUs meanwhile"
                if others and self._pays_off(lost_s[number] * place.gpus, len(others) + place.gpus):
                    for mover in (number, *others):
                        self.leave(mover)

    def make_room(self, gpus: int, lost_s: float) -> list[int]:
        """Let other jobs move for one that starts; lost_s: the time links would cost it if split over two hosts."""
        if not self._pays_off(lost_s * gpus, 1):
            return []
        others = self._in_the_way(gpus)
        if not self._pays_off(lost_s * gpus, len(others)):
            return []
        for mover in others:
            self.leave(mover)
        return others

    def _pays_off(self, lost_gpu_s: float, gpus_that_start: int) -> bool:
        return lost_gpu_s > _PAYS_OFF * self.start_s * gpus_that_start

    def _elsewhere(self, place: Place) -> Placement:
        """The placement that a job would get now."""
        self.pool.give_back(place.placement)
        found = self.pool.take(place.gpus, self.rule)
        self.pool.give_back(found)
        was_free = self.pool.take_again(place.placement)
        assert was_free, "nobody else has taken these GPUs meanwhile"
        return found

    def _in_the_way(self, gpus: int) -> list[int]:
        """The fewest single-GPU jobs that must leave so that one host has `gpus` free GPUs; none if that cannot be."""
        if not 1 < gpus <= self.pool.gpus_per_host or self.pool.has_room(gpus):
            return []
        singles: dict[int, list[int]] = {}
        for number, place in self.places.items():
            if place.gpus == 1:
                singles.setdefault(place.placement[0][0], []).append(number)
        short = {host: gpus - self.pool.free(host) for host in singles}
        able = [host for host, own in singles.items() if len(own) >= short[host]]
        if not able:
            return []
        host = min(able, key=lambda own: (short[own], own))
        return sorted(singles[host], key=lambda number: (-self.rest_s(number), number))[: short[host]]

    def _breadth(self, placement: Placement) -> tuple[int, int]:
        return len(self.pool.racks_of(placement)), len(placement)
