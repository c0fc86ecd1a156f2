"""When to ask a peer again: after two round trips, and twice as long after every question without an answer.

A peer that sends to several ranks in turn makes pauses. So a rank asks after two of the longest pauses seen lately, if
these are longer than a round trip: otherwise it would ask for rows that are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_GUESS_S = 0.01
_MARGIN_S = 0.005
_LONGEST_S = 0.5
_WEIGHT = 0.125
"""Of the newest round trip in the mean."""
_PAUSE_WEIGHT = 0.002
"""How quickly a long pause is forgotten, with every arrival."""


@dataclass
class RoundTrip:
    """How long a peer takes to answer, estimated from its past answers, and how long it pauses between rows."""

    seconds: float = _FIRST_GUESS_S
    pause_s: float = _FIRST_GUESS_S

    def note(self, seconds: float) -> None:
        """Record how long a peer took to answer a question."""
        self.seconds += _WEIGHT * (seconds - self.seconds)

    def note_pause(self, seconds: float) -> None:
        """Record the pause before rows that came without being asked for."""
        self.pause_s = max(seconds, (1 - _PAUSE_WEIGHT) * self.pause_s)


class Retries:
    """Questions to one peer about one exchange. Times are given, in seconds of any clock."""

    def __init__(self, round_trip: RoundTrip, now_s: float) -> None:
        self._round_trip = round_trip
        self._heard_s = now_s
        self._asked_s: float | None = None
        self._began = False
        self._unanswered = 0

    def due_s(self, *, lost: bool = False) -> float:
        """When to ask next, unless rows arrive; `lost`: rows are known to be lost, and come only if asked for."""
        if lost and self._asked_s is None:
            return self._heard_s + _MARGIN_S
        usual_s = self._round_trip.seconds if lost else max(self._round_trip.seconds, self._round_trip.pause_s)
        pause_s = min(_LONGEST_S, (2 * usual_s + _MARGIN_S) * 2.0**self._unanswered)
        return pause_s + (self._heard_s if self._asked_s is None else max(self._heard_s, self._asked_s))

    def ask(self, now_s: float) -> None:
        """A question is sent."""
        if self._asked_s is not None:
            self._unanswered = min(self._unanswered + 1, 16)
        self._asked_s = now_s

    def hear(self, now_s: float) -> None:
        """Rows have come that were missing."""
        if self._asked_s is None and self._began:
            self._round_trip.note_pause(now_s - self._heard_s)
        if self._asked_s is not None and not self._unanswered:
            # Of several questions nobody knows which one was answered.
            self._round_trip.note(now_s - self._asked_s)
        self._heard_s, self._asked_s, self._unanswered, self._began = now_s, None, 0, True

    def start(self, now_s: float) -> None:
        """Rows may come from now on."""
        self._heard_s = max(self._heard_s, now_s)
