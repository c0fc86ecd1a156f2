"""Spans that overlap, put side by side in as few lanes as needed."""

from __future__ import annotations

from collections.abc import Iterable


def first_free_lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """The lane of each (begin, end), sorted by begin: the first lane whose last span has ended by then."""
    ends: list[float] = []
    lanes: list[int] = []
    for begin, end in spans:
        lane = next((number for number, taken_until in enumerate(ends) if taken_until <= begin), len(ends))
        if lane == len(ends):
            ends.append(end)
        ends[lane] = end
        lanes.append(lane)
    return lanes
