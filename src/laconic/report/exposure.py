"""Assigns waits to exchanges.

A wait records from when to when training stood still. The ends of exchanges show what training waited for:

    wait               |------------------------|
    bucket 0     ---------|                     :       until here it was for bucket 0,
    bucket 1           ------------|            :       until here for bucket 1,
    bucket 2           -------------------------|       and then for bucket 2

Where another exchange is still in flight when the wait ends, not all were waited for (a layer needs its own gradients
only): then the whole wait was for the exchange whose end ended it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laconic.core.event import Event

# Begin and end are differences of floating-point seconds since boot: the last bits of two equal times may differ.
SLACK_S = 1e-6


@dataclass(frozen=True)
class Waiting:
    """A wait, or a part of one, and the exchange it was for."""

    begin_s: float
    end_s: float
    exchange: Event | None
    """None: no exchange ended in it."""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end_s - self.begin_s


class Exchanges:
    """The exchanges of one rank by their ends."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = sorted((event for event in events if event.kind == "exchange"), key=end_of)
        self._ends_s = [end_of(event) for event in self._events]

    def ended_in(self, begin_s: float, end_s: float) -> Sequence[Event]:
        """The exchanges that ended in an interval, in the order of their ends."""
        first = bisect_left(self._ends_s, begin_s - SLACK_S)
        return self._events[first : bisect_right(self._ends_s, end_s + SLACK_S)]

    def ended_by(self, wait: Event) -> Event | None:
        """The exchange whose end ended a wait; None if there is none."""
        within = self.ended_in(wait.time_s, end_of(wait))
        return within[-1] if within else None

    def under_way(self, at_s: float) -> bool:
        """Whether an exchange is in flight at this time."""
        later = self._events[bisect_right(self._ends_s, at_s + SLACK_S) :]
        return any(event.time_s < at_s - SLACK_S for event in later)

    def waited_for(self, wait: Event, shortest_s: float = SLACK_S) -> list[Waiting]:
        """The parts of a wait, in the order of time; together they are all of it.

        shortest_s: a shorter part belongs to the one after it; the last part may be shorter.
        """
        within = self.ended_in(wait.time_s, end_of(wait))
        if not within:
            return [Waiting(wait.time_s, end_of(wait), None)]
        if self.under_way(end_of(wait)):
            within = within[-1:]
        parts: list[Waiting] = []
        begin_s = wait.time_s
        for exchange in within[:-1]:
            if end_of(exchange) >= begin_s + shortest_s:
                parts.append(Waiting(begin_s, end_of(exchange), exchange))
                begin_s = end_of(exchange)
        # A waiting thread wakes up a little after the end of the exchange.
        return [*parts, Waiting(begin_s, end_of(wait), within[-1])]


def end_of(event: Event) -> float:
    """Its end."""
    return event.time_s + event.duration_s
