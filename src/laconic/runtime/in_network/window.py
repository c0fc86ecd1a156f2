"""Which chunks a rank may send, which are in flight, and when it asks for missing sums.

A chunk may be sent when the sums of all chunks up to S before it have arrived. A rank has no more chunks in flight than
the network has carried without a loss so far: the limit doubles with every round trip until frames are lost, is then
halved, and grows by one per round trip afterwards, as in TCP.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Chunks = npt.NDArray[np.int64]
_START = 64
"""Frames in flight at first."""
_LEAST = 16
"""The least limit after any number of losses: few enough for every link, enough for progress."""
_FIRST_GUESS_S = 0.02
_MARGIN_S = 0.005
_LONGEST_S = 0.5
_WEIGHT = 0.125
"""Weight of the latest round trip in the mean."""
_NOT_SENT, _IN_FLIGHT, _COME = range(3)


class Window:
    """S consecutive chunks, starting at the first without a sum. Times are passed in, in seconds of any clock."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.base = 0
        """The first chunk without a sum."""
        self.in_flight = 0
        """Chunks that have been sent and have no sum yet."""
        self._state = np.zeros(num_slots, np.uint8)
        self._sent_s = np.full(num_slots, np.nan)
        self._limit = float(min(_START, num_slots))
        self._doubling = True
        self._round_trip_s = _FIRST_GUESS_S
        self._moved_s = 0.0
        self._asked = 0

    @property
    def end(self) -> int:
        """The first chunk that may not be sent yet."""
        return self.base + self.num_slots

    @property
    def room(self) -> int:
        """Chunks that may be sent now."""
        return max(0, int(self._limit) - self.in_flight)

    def send(self, first: int, count: int, now_s: float) -> None:
        """These chunks are sent for the first time."""
        places = np.arange(first, first + count) % self.num_slots
        if not self.in_flight:
            self._moved_s = now_s
        self._state[places] = _IN_FLIGHT
        self._sent_s[places] = now_s
        self.in_flight += count

    def come(self, chunks: Chunks, now_s: float) -> npt.NDArray[np.bool_]:
        """Sums of these chunks have arrived; returns which of them were expected."""
        inside = (chunks >= self.base) & (chunks < self.end)
        places = chunks % self.num_slots
        new = inside & (self._state[places] == _IN_FLIGHT)
        _, firsts = np.unique(chunks, return_index=True)
        new[np.setdiff1d(np.arange(len(chunks)), firsts)] = False
        places = places[new]
        if not len(places):
            return new
        took_s = now_s - self._sent_s[places[-1]]
        if np.isfinite(took_s):  # for a retransmitted chunk it is unknown which frame was answered
            self._round_trip_s += _WEIGHT * (took_s - self._round_trip_s)
        self._limit = min(self.num_slots, self._limit + len(places) * (1.0 if self._doubling else 1.0 / self._limit))
        self._state[places] = _COME
        self.in_flight -= len(places)
        if self._state[self.base % self.num_slots] == _COME:
            self._advance()
            self._moved_s, self._asked = now_s, 0
        return new

    def _advance(self) -> None:
        order = (self.base + np.arange(self.num_slots)) % self.num_slots
        waiting = self._state[order] != _COME
        count = int(np.argmax(waiting)) if waiting.any() else self.num_slots
        self._state[order[:count]] = _NOT_SENT
        self.base += count

    @property
    def due_s(self) -> float:
        """When to ask for the chunks in flight; never, if there are none."""
        if not self.in_flight:
            return np.inf
        return self._moved_s + min(_LONGEST_S, (2 * self._round_trip_s + _MARGIN_S) * 2.0**self._asked)

    def ask(self, now_s: float) -> tuple[int, int]:
        """The first chunk to ask for, and how many from it on; the interval to the next question grows."""
        self._moved_s, self._asked = now_s, min(self._asked + 1, 16)
        sent = np.flatnonzero(self._state[(self.base + np.arange(self.num_slots)) % self.num_slots] == _IN_FLIGHT)
        return self.base, int(sent[-1]) + 1 if len(sent) else 1

    def send_again(self, first: int, offsets: Sequence[int]) -> list[int]:
        """Which of the chunks missing at the aggregator must be retransmitted; they count as lost."""
        chunks = [first + offset for offset in offsets if self.base <= first + offset < self.end]
        lost = [chunk for chunk in chunks if self._state[chunk % self.num_slots] == _IN_FLIGHT]
        if lost:
            self._limit, self._doubling = max(float(_LEAST), self._limit / 2), False
            self._sent_s[[chunk % self.num_slots for chunk in lost]] = np.nan
        return lost
